"""What a run gave."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.model import Transformer
from headwise.training.recipe import Recipe


@dataclass
class TrainResult:
    """What a run gave: the model, how far it came, every logged row, and how it ended."""

    model: Transformer
    recipe: Recipe
    step: int
    tokens: int  # read so far
    loss: float  # of the last step
    valid_loss: float | None  # of the last evaluation, on text that was held out
    best_step: int  # of the best evaluation
    stop_reason: str  # finished | early | interrupted
    seconds: float  # of this call
    history: list[dict[str, float]] = field(repr=False)
    folder: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """How it ended, as plain data; the model by its folder, the recipe and all logged rows left out."""
        return {
            "steps": self.step, "tokens": self.tokens, "loss": nonfinite_to_none(self.loss), "valid_loss": self.valid_loss,
            "stop_reason": self.stop_reason, "best_step": self.best_step, "seconds": self.seconds,
            "parameters": self.model.spec.num_parameters,
            "model": None if self.folder is None else str(self.folder / "model"),
        }  # fmt: skip


def nonfinite_to_none(value: float) -> float | None:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else None
