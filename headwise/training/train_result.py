"""Result of a training run."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.model import Transformer
from headwise.training.recipe import Recipe


@dataclass
class TrainResult:
    """Result of a training run.

    Attributes:
        model: The trained model.
        recipe: Recipe of the run.
        step: Number of steps done.
        tokens: Number of training tokens.
        loss: Training loss of the last logged step.
        valid_loss: Held-out loss of the last evaluation. None without held-out text.
        best_step: Step of the best evaluation.
        stop_reason: "finished", "early" or "interrupted".
        seconds: Duration of this call.
        history: Logged metrics.
        folder: Run folder. None if nothing was written.
    """

    model: Transformer
    recipe: Recipe
    step: int
    tokens: int
    loss: float
    valid_loss: float | None
    best_step: int
    stop_reason: str
    seconds: float
    history: list[dict[str, float]] = field(repr=False)
    folder: Path | None = None

    def __repr__(self) -> str:
        from headwise.ui.result_text import train_result_table

        return train_result_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import train_result_table

        return train_result_table(self).as_html()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, with the path of the model, without recipe and history."""
        return {
            "steps": self.step, "tokens": self.tokens, "loss": nonfinite_float_to_none(self.loss),
            "valid_loss": self.valid_loss,
            "stop_reason": self.stop_reason, "best_step": self.best_step, "seconds": self.seconds,
            "parameters": self.model.spec.num_parameters,
            "model": None if self.folder is None else str(self.folder / "model"),
        }  # fmt: skip


def nonfinite_float_to_none(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON does not support."""
    return value if math.isfinite(value) else None
