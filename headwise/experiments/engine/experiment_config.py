"""A point: everything that decides a training run, as plain data, and what the run gave."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError, suggest_names
from headwise.model import Transformer
from headwise.spec import JSONSpec, ModelSpec
from headwise.training import Recipe


@dataclass(frozen=True)
class ExperimentConfig(JSONSpec):
    """A model to be trained. The text is a file or folder; none is the synthetic language, whose words come as tokens."""

    spec: ModelSpec
    recipe: Recipe
    init: str = "default"  # how it begins: a name of INITIALIZERS
    text: str = ""
    tokenizer: str = "word"
    checkpoint_steps: tuple[int, ...] = ()  # steps after which the model is kept as well; 0: before the first
    teacher: "ExperimentConfig | None" = None  # another point, that this one learns from
    # What it learns from it: losses of headwise.distillation, joined by +; of maps also how heads are paired.
    distill_losses: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoint_steps", tuple(sorted(set(self.checkpoint_steps))))
        if self.init not in INITIALIZERS:
            raise HeadwiseError(f"there is no init {self.init!r}; {suggest_names(self.init, INITIALIZERS)}")
        if (self.teacher is None) != (self.distill_losses == ""):
            raise HeadwiseError("a point that learns from a teacher says by what, and one that does not has none.")

    def key(self, *extra: str) -> str:
        """A short name for this point, and for whatever else decides it."""
        key_text = json.dumps([self.to_json(), *extra])
        return hashlib.sha256(key_text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class TrainedModel:
    """A trained point: what was measured at the end, and the model on the disk."""

    config: ExperimentConfig
    folder: Path
    results: dict[str, Any]

    @property
    def loss(self) -> float:
        """On held-out text, nats a token; infinite if the run diverged."""
        return float("inf") if self.has_diverged else self.results["loss"]

    @property
    def has_diverged(self) -> bool:
        """Whether training ran away."""
        return self.results["loss"] is None

    @property
    def loss_curve(self) -> list[tuple[int, float]]:
        """The held-out loss through training: step, loss."""
        return [(int(step), float(loss)) for step, loss in self.results["curve"]]

    @property
    def probe_accuracy(self) -> dict[str, float]:
        """The share of right answers by kind of quiz; empty for another text than the synthetic language."""
        return self.results["probe_accuracy"]

    def load_model(self, step: int | None = None) -> Transformer:
        """The trained model, or as it was after a step that was watched."""
        folder = self.folder / ("model" if step is None else f"step-{step}")
        if step is None and self.has_diverged:
            raise HeadwiseError(f"the run in {self.folder} diverged and left no model; lower the learning rate.")
        if not folder.is_dir():
            raise HeadwiseError(
                f"the model was not kept at step {step}; watched: {list(self.config.checkpoint_steps)}."
            )
        return Transformer.reopen(folder).eval()


# How a model begins, when not as usual. Each changes a new model in place; what it freezes stays as it is.


def _init_identity_output(model: Transformer) -> None:
    """Heads are laid side by side and never mixed."""
    for layer in model.attention_layers():
        weight = layer.output_projection.weight
        if weight.shape[0] != weight.shape[1]:
            raise HeadwiseError(
                f"an identity W_O needs heads × head_dim equal to the width, got {weight.shape[1]} and {weight.shape[0]}."
            )
        torch.nn.init.eye_(weight)
        weight.requires_grad_(False)


def _init_frozen_output(model: Transformer) -> None:
    """W_O stays as it was drawn."""
    for layer in model.attention_layers():
        layer.output_projection.weight.requires_grad_(False)


def _init_twins(model: Transformer) -> None:
    """Head 1 of every layer is born equal to head 0, W_O included."""
    _copy_head(model, "QKVO")


def _init_half_twins(model: Transformer) -> None:
    """Head 1 of every layer reads as head 0 does, but writes elsewhere."""
    _copy_head(model, "QKV")


@torch.no_grad()
def _copy_head(model: Transformer, projections: str) -> None:
    for layer in model.attention_layers():
        source, target = layer.heads[0], layer.heads[1]
        for projection in projections:
            getattr(target, f"W_{projection}").copy_(getattr(source, f"W_{projection}"))
            bias = getattr(source, f"b_{projection}", None)
            if bias is not None:
                getattr(target, f"b_{projection}").copy_(bias)


INITIALIZERS: dict[str, Callable[[Transformer], None] | None] = {
    "default": None,
    "identity W_O": _init_identity_output,
    "frozen W_O": _init_frozen_output,
    "twins": _init_twins,
    "half twins": _init_half_twins,
}
