"""The lab: how large experiments are, which seeds they use, and the models they share."""

from dataclasses import dataclass, replace
from typing import Any

from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.engine.train_model import train_or_load
from headwise.spec import AttentionSpec, JSONSpec, ModelSpec
from headwise.text import Corpus
from headwise.text.synthetic import VOCABULARY
from headwise.training import Recipe

QUICK_SEEDS, FULL_SEEDS = 1, 3  # how many seeds
EXPLORED_SEEDS = range(10)  # seeds that were looked at while rules were made: verdicts on them are for exploring
# A vocabulary to begin with; that of the tokenizer takes its place when a model is made.
SYNTHETIC_VOCAB_SIZE = len(VOCABULARY)


@dataclass(frozen=True)
class ExperimentSize(JSONSpec):
    """The usual model and its training; claims say where they differ."""

    width: int = 64
    heads: int = 8
    layers: int = 2
    context: int = 128
    steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 2e-3
    documents: int = 200  # held-out documents that heads are looked at on


@dataclass(frozen=True)
class ExperimentContext:
    """What an experiment is handed. `config` names a model, `trained` gives it trained."""

    store: ExperimentStore
    seeds: tuple[int, ...] = (0,)
    size: ExperimentSize = ExperimentSize()

    def make_config(
        self,
        seed: int,
        heads: int | None = None,
        *,
        layers: int | None = None,
        init: str = "default",
        recipe: dict[str, Any] | None = None,
        **attention: Any,
    ) -> ExperimentConfig:
        """The usual model but for what is given: fields of its attention by name, of its recipe in `recipe`."""
        size = self.size
        spec = ModelSpec(
            vocab=SYNTHETIC_VOCAB_SIZE,
            context=size.context,
            layers=size.layers if layers is None else layers,
            attention=AttentionSpec(width=size.width, heads=size.heads if heads is None else heads, **attention),
        )
        full_recipe = replace(self.make_recipe(seed), **(recipe or {}))
        return default_config(spec, full_recipe, init)

    def make_recipe(self, seed: int) -> Recipe:
        """The usual training."""
        size = self.size
        return default_recipe(size.steps, seed=seed, batch_size=size.batch_size, learning_rate=size.learning_rate)

    def train_or_load(self, config: ExperimentConfig) -> TrainedModel:
        """The point, trained; from the store, or now."""
        return train_or_load(config, self.store)

    def held_out_corpus(self, seed: int | None = None) -> Corpus:
        """Held-out documents of the synthetic language, with their relations, to look at heads on: of a seed, or for all."""
        base_seed = self.seeds[0] + 1 if seed is None else seed
        return Corpus.synthetic("held-out", documents=self.size.documents, seed=10_000 + base_seed)


def default_config(
    spec: ModelSpec, recipe: Recipe, init: str = "default", text: str = "", tokenizer: str = "word"
) -> ExperimentConfig:
    """A point that is also kept as it was at the start, and after an eighth, a quarter and a half of its steps."""
    return ExperimentConfig(
        spec, recipe, init, text, tokenizer, (0, *(recipe.steps // divisor for divisor in (8, 4, 2)))
    )


def default_recipe(steps: int, **overrides: Any) -> Recipe:
    """How points are trained: one text a row, the held-out loss measured eight times on the way."""
    interval = max(1, steps // 8)
    defaults = {
        "final_lr_fraction": 0.05,
        "rows": "texts",
        "warmup": min(100, steps // 10),
        "log_every": min(10, steps),
    }
    return Recipe(
        **{
            **defaults,
            "steps": steps,
            "evaluate_every": interval,
            "save_every": interval,
            "keep_checkpoints": 1,
            **overrides,
        }
    )
