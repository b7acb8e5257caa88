"""A point: everything that decides a training run, as plain data, and what the run gave."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError, close_names
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.spec.json_spec import Wire
from headwise.training.recipe import Recipe


@dataclass(frozen=True)
class Point(Wire):
    """A model to be trained. The text is a file or folder; none is the little language, whose words come as tokens."""

    spec: ModelSpec
    recipe: Recipe
    start: str = "usual"  # how it begins: a name of STARTS
    text: str = ""
    tokenizer: str = "word"
    watch: tuple[int, ...] = ()  # steps after which the model is kept as well; 0: before the first
    teacher: "Point | None" = None  # another point, that this one learns from
    by: str = (
        ""  # what it learns from it: losses of headwise.distillation, joined by +; of maps also how heads are paired
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "watch", tuple(sorted(set(self.watch))))
        if self.start not in STARTS:
            raise HeadwiseError(f"there is no beginning {self.start!r}; {close_names(self.start, STARTS)}")
        if (self.teacher is None) != (self.by == ""):
            raise HeadwiseError("a point that learns from a teacher says by what, and one that does not has none.")

    def key(self, *more: str) -> str:
        """A short name for this point, and for whatever else decides it."""
        told = json.dumps([self.to_json(), *more])
        return hashlib.sha256(told.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Made:
    """A trained point: what was measured at the end, and the model on the disk."""

    point: Point
    folder: Path
    results: dict[str, Any]

    @property
    def loss(self) -> float:
        """On held-out text, nats a token; infinite if the run diverged."""
        return float("inf") if self.diverged else self.results["loss"]

    @property
    def diverged(self) -> bool:
        """Whether training ran away."""
        return self.results["loss"] is None

    @property
    def curve(self) -> list[tuple[int, float]]:
        """The held-out loss through training: step, loss."""
        return [(int(step), float(loss)) for step, loss in self.results["curve"]]

    @property
    def marks(self) -> dict[str, float]:
        """The share of right answers by kind of quiz; empty for another text than the little language."""
        return self.results["marks"]

    def model(self, step: int | None = None) -> Transformer:
        """The trained model, or as it was after a step that was watched."""
        folder = self.folder / ("model" if step is None else f"step-{step}")
        if step is None and self.diverged:
            raise HeadwiseError(f"the run in {self.folder} diverged and left no model; lower the rate.")
        if not folder.is_dir():
            raise HeadwiseError(f"the model was not kept at step {step}; watched: {list(self.point.watch)}.")
        return Transformer.reopen(folder).eval()


# How a model begins, when not as usual. Each changes a new model in place; what it freezes stays as it is.


def _identity_output(model: Transformer) -> None:
    """Heads are laid side by side and never mixed."""
    for layer in model.attention_layers():
        weight = layer.write.weight
        if weight.shape[0] != weight.shape[1]:
            raise HeadwiseError(
                f"an identity W_O needs heads × head_dim equal to the width, got {weight.shape[1]} and {weight.shape[0]}."
            )
        torch.nn.init.eye_(weight)
        weight.requires_grad_(False)


def _frozen_output(model: Transformer) -> None:
    """W_O stays as it was drawn."""
    for layer in model.attention_layers():
        layer.write.weight.requires_grad_(False)


def _twins(model: Transformer) -> None:
    """Head 1 of every layer is born equal to head 0, W_O included."""
    _copy(model, "QKVO")


def _half_twins(model: Transformer) -> None:
    """Head 1 of every layer reads as head 0 does, but writes elsewhere."""
    _copy(model, "QKV")


@torch.no_grad()
def _copy(model: Transformer, letters: str) -> None:
    for layer in model.attention_layers():
        one, other = layer.heads[0], layer.heads[1]
        for letter in letters:
            getattr(other, f"W_{letter}").copy_(getattr(one, f"W_{letter}"))
            bias = getattr(one, f"b_{letter}", None)
            if bias is not None:
                getattr(other, f"b_{letter}").copy_(bias)


STARTS: dict[str, Callable[[Transformer], None] | None] = {
    "usual": None,
    "identity W_O": _identity_output,
    "frozen W_O": _frozen_output,
    "twins": _twins,
    "half twins": _half_twins,
}
