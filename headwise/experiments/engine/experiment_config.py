"""Configuration of one training run as plain data, and its results."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.errors import ArgumentError, HeadwiseError, suggest_names
from headwise.model import Transformer
from headwise.spec import JSONSpec, ModelSpec
from headwise.training import Recipe


@dataclass(frozen=True)
class ExperimentConfig(JSONSpec):
    """Configuration of one model to train.

    Attributes:
        spec: Architecture of the model.
        recipe: Training settings.
        init: Initialization, a key of INITIALIZERS.
        text: Text file or folder. Empty: the synthetic language.
        tokenizer: Tokenizer name.
        checkpoint_steps: Steps after which a copy of the model is saved. 0 is the initial model.
        teacher: Configuration of the teacher for distillation, or None.
        distill_losses: Distillation losses of `headwise.distillation`, joined by "+". A loss on maps may be followed by
            a space and the pairing of heads.
    """

    spec: ModelSpec
    recipe: Recipe
    init: str = "default"
    text: str = ""
    tokenizer: str = "word"
    checkpoint_steps: tuple[int, ...] = ()
    teacher: "ExperimentConfig | None" = None
    distill_losses: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoint_steps", tuple(sorted(set(self.checkpoint_steps))))
        if self.init not in INITIALIZERS:
            raise ArgumentError(f"init={self.init!r} does not exist: {suggest_names(self.init, INITIALIZERS)}")
        if (self.teacher is None) != (self.distill_losses == ""):
            raise ArgumentError(
                "teacher and distill_losses must be set together. "
                f"Got teacher={'None' if self.teacher is None else 'set'}, distill_losses={self.distill_losses!r}. "
                "Set both or neither."
            )

    def key(self, *extra: str) -> str:
        """Return a hash of this configuration and of further strings that determine the result."""
        key_text = json.dumps([self.to_json(), *extra])
        return hashlib.sha256(key_text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class TrainedModel:
    """A trained model on disk and its measurements.

    Attributes:
        config: Configuration of the run.
        folder: Folder of the run.
        results: Measurements at the end of training.
    """

    config: ExperimentConfig
    folder: Path
    results: dict[str, Any]

    @property
    def loss(self) -> float:
        """Held-out loss in nats per token. Infinite if the run diverged."""
        return float("inf") if self.has_diverged else self.results["loss"]

    @property
    def has_diverged(self) -> bool:
        """Whether training diverged."""
        return self.results["loss"] is None

    @property
    def loss_curve(self) -> list[tuple[int, float]]:
        """Held-out loss during training as (step, loss) pairs."""
        return [(int(step), float(loss)) for step, loss in self.results["curve"]]

    @property
    def probe_accuracy(self) -> dict[str, float]:
        """Accuracy by kind of cloze probe. Empty if the text is not the synthetic language."""
        return self.results["probe_accuracy"]

    def load_model(self, step: int | None = None) -> Transformer:
        """Load the trained model, or its checkpoint after `step`."""
        folder = self.folder / ("model" if step is None else f"step-{step}")
        if step is None and self.has_diverged:
            raise HeadwiseError(
                f"{self.folder}: the run diverged, so the trained model does not exist. Use a lower learning rate."
            )
        if not folder.is_dir():
            raise ArgumentError(
                f"step={step}: no checkpoint was saved at this step. Use one of {list(self.config.checkpoint_steps)}."
            )
        return Transformer.reopen(folder).eval()


# Initializers. Each changes a new model in place. Weights that it freezes are not trained.


def _init_identity_output(model: Transformer) -> None:
    """Set W_O to the identity and freeze it, so that heads are concatenated and never mixed."""
    for layer in model.attention_layers():
        weight = layer.output_projection.weight
        if weight.shape[0] != weight.shape[1]:
            raise ArgumentError(
                f"init='identity W_O' needs heads × head_dim equal to width. Got {weight.shape[1]} and {weight.shape[0]}. "
                "Change heads or head_dim."
            )
        torch.nn.init.eye_(weight)
        weight.requires_grad_(False)


def _init_frozen_output(model: Transformer) -> None:
    """Freeze W_O at its random initialization."""
    for layer in model.attention_layers():
        layer.output_projection.weight.requires_grad_(False)


def _init_twins(model: Transformer) -> None:
    """Initialize head 1 of every layer as a copy of head 0, including W_O."""
    _copy_first_head_to_second(model, "QKVO")


def _init_half_twins(model: Transformer) -> None:
    """Copy W_Q, W_K and W_V of head 0 to head 1 in every layer, but not W_O."""
    _copy_first_head_to_second(model, "QKV")


@torch.no_grad()
def _copy_first_head_to_second(model: Transformer, projections: str) -> None:
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
