"""Settings of an experiment: model size, seeds, and access to shared trained models."""

from dataclasses import dataclass, replace
from typing import Any

from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.engine.train_model import train_or_load
from headwise.spec import AttentionSpec, JSONSpec, ModelSpec
from headwise.text import Corpus
from headwise.text.synthetic import VOCABULARY
from headwise.training import Recipe

QUICK_SEEDS, FULL_SEEDS = 1, 3  # number of seeds
EXPLORED_SEEDS = range(10)  # seeds used while the rules were designed: verdicts on them are exploratory
# Placeholder. The vocabulary size of the tokenizer replaces it when a model is created.
SYNTHETIC_VOCAB_SIZE = len(VOCABULARY)


@dataclass(frozen=True)
class ExperimentSize(JSONSpec):
    """Default model size and training settings. A claim documents where it differs.

    Attributes:
        width: Width of the residual stream.
        heads: Heads per layer.
        layers: Number of layers.
        context: Context length in tokens.
        steps: Training steps.
        batch_size: Rows per step.
        learning_rate: Peak learning rate.
        documents: Number of held-out documents on which heads are analyzed.
    """

    width: int = 64
    heads: int = 8
    layers: int = 2
    context: int = 128
    steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 2e-3
    documents: int = 200


@dataclass(frozen=True)
class TrainedModelProvider:
    """Input of an experiment. `make_config` describes a model, `train_or_load` returns it trained.

    Attributes:
        store: Store of trained models and results.
        seeds: Seeds to train and measure with.
        size: Default model size and training settings.
    """

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
        """Return the default configuration with overrides: attention fields by keyword, recipe fields in `recipe`."""
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
        """Return the default recipe."""
        size = self.size
        return default_recipe(size.steps, seed=seed, batch_size=size.batch_size, learning_rate=size.learning_rate)

    def train_or_load(self, config: ExperimentConfig) -> TrainedModel:
        """Return the trained model from the store, or train it now."""
        return train_or_load(config, self.store)

    def held_out_corpus(self, seed: int | None = None) -> Corpus:
        """Return held-out documents of the synthetic language with their relations, for one seed or shared by all seeds."""
        base_seed = self.seeds[0] + 1 if seed is None else seed
        return Corpus.synthetic("held-out", documents=self.size.documents, seed=10_000 + base_seed)


def default_config(
    spec: ModelSpec, recipe: Recipe, init: str = "default", text: str = "", tokenizer: str = "word"
) -> ExperimentConfig:
    """Return a configuration with checkpoints at step 0 and after an eighth, a quarter and half of the steps."""
    return ExperimentConfig(
        spec, recipe, init, text, tokenizer, (0, *(recipe.steps // divisor for divisor in (8, 4, 2)))
    )


def default_recipe(steps: int, **overrides: Any) -> Recipe:
    """Return the default recipe: one text per row, and eight evaluations of the held-out loss."""
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
