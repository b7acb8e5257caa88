"""Whose mode counts: training, and activation checkpointing, of a model that is not ours."""

from typing import Any

from torch import nn


class Modes(nn.Module):
    """What a handle says of the modes of its model."""

    model: Any

    @property
    def training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the model is in training mode: theirs decides."""
        model = self.__dict__.get("_modules", {}).get("model")
        return False if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass  # `train` passes the mode on to the model, which keeps it

    @property
    def checkpointing(self) -> bool:
        """Whether activations inside blocks are recomputed in the backward pass."""
        return bool(self.model.is_gradient_checkpointing)

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        if on and not self.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        elif not on and self.checkpointing:
            self.model.gradient_checkpointing_disable()
