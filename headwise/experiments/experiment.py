"""The lab: how large experiments are, which seeds they use, and the models they share."""

from dataclasses import dataclass, replace
from typing import Any

from headwise.experiments.engine.experiment_config import Made, Point
from headwise.experiments.engine.store import Store
from headwise.experiments.engine.train_model import make
from headwise.spec import AttentionSpec, ModelSpec
from headwise.spec.json_spec import Wire
from headwise.text.corpus import Corpus
from headwise.text.synthetic.vocabulary import VOCABULARY
from headwise.training.recipe import Recipe

QUICK, FULL = 1, 3  # how many seeds
SEEN = range(10)  # seeds that were looked at while rules were made: verdicts on them are for exploring
LITTLE_WORDS = len(VOCABULARY)  # a vocabulary to begin with; that of the tokenizer takes its place when a model is made


@dataclass(frozen=True)
class LabSize(Wire):
    """The usual model and its training; claims say where they differ."""

    width: int = 64
    heads: int = 8
    layers: int = 2
    context: int = 128
    steps: int = 2000
    batch: int = 16
    rate: float = 2e-3
    documents: int = 200  # held-out documents that heads are looked at on


@dataclass(frozen=True)
class Lab:
    """What an experiment is handed. `point` names a model, `made` gives it trained."""

    store: Store
    seeds: tuple[int, ...] = (0,)
    size: LabSize = LabSize()

    def point(
        self,
        seed: int,
        heads: int | None = None,
        *,
        layers: int | None = None,
        start: str = "usual",
        recipe: dict[str, Any] | None = None,
        **attention: Any,
    ) -> Point:
        """The usual model but for what is given: fields of its attention by name, of its recipe in `recipe`."""
        size = self.size
        spec = ModelSpec(
            vocab=LITTLE_WORDS,
            context=size.context,
            layers=size.layers if layers is None else layers,
            attention=AttentionSpec(width=size.width, heads=size.heads if heads is None else heads, **attention),
        )
        taught = replace(self.recipe(seed), **(recipe or {}))
        return usual_point(spec, taught, start)

    def recipe(self, seed: int) -> Recipe:
        """The usual training."""
        size = self.size
        return usual_recipe(size.steps, seed=seed, batch=size.batch, rate=size.rate)

    def made(self, point: Point) -> Made:
        """The point, trained; from the store, or now."""
        return make(point, self.store)

    def documents(self, seed: int | None = None) -> Corpus:
        """Held-out documents of the little language, with their relations, to look at heads on: of a seed, or for all."""
        own = self.seeds[0] + 1 if seed is None else seed
        return Corpus.little("held-out", documents=self.size.documents, seed=10_000 + own)


def usual_point(
    spec: ModelSpec, recipe: Recipe, start: str = "usual", text: str = "", tokenizer: str = "word"
) -> Point:
    """A point that is also kept as it was at the start, and after an eighth, a quarter and a half of its steps."""
    return Point(spec, recipe, start, text, tokenizer, (0, *(recipe.steps // part for part in (8, 4, 2))))


def usual_recipe(steps: int, **more: Any) -> Recipe:
    """How points are trained: one text a row, the held-out loss measured eight times on the way."""
    often = max(1, steps // 8)
    told = {"floor": 0.05, "rows": "texts", "warmup": min(100, steps // 10), "log_every": min(10, steps)}
    return Recipe(**{**told, "steps": steps, "evaluate_every": often, "save_every": often, "keep": 1, **more})
