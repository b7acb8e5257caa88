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
        return bool(getattr(self.model, _now_called(self.model, "is_{}_checkpointing")))

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        if on and not self.checkpointing:
            getattr(self.model, _now_called(self.model, "{}_checkpointing_enable"))({"use_reentrant": False})
        elif not on and self.checkpointing:
            getattr(self.model, _now_called(self.model, "{}_checkpointing_disable"))()


def _now_called(model: Any, name: str) -> str:
    """What transformers calls it: checkpointing of activations since 5.23, of gradients before."""
    newer = name.format("activation")
    return newer if hasattr(model, newer) else name.format("gradient")
