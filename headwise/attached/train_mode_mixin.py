"""Training mode and activation checkpointing of an attached model."""

from typing import Any

from torch import nn


class TrainModeMixin(nn.Module):
    """Training mode and activation checkpointing of a handle, delegated to its model."""

    model: Any

    @property
    def training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the transformers model is in training mode."""
        model = self.__dict__.get("_modules", {}).get("model")
        return False if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass  # `train` passes the mode on to the model, which keeps it

    @property
    def checkpointing(self) -> bool:
        """Whether activations inside blocks are recomputed in the backward pass."""
        return bool(getattr(self.model, _checkpointing_name(self.model, "is_{}_checkpointing")))

    @checkpointing.setter
    def checkpointing(self, enabled: bool) -> None:
        if enabled and not self.checkpointing:
            getattr(self.model, _checkpointing_name(self.model, "{}_checkpointing_enable"))({"use_reentrant": False})
        elif not enabled and self.checkpointing:
            getattr(self.model, _checkpointing_name(self.model, "{}_checkpointing_disable"))()


def _checkpointing_name(model: Any, name: str) -> str:
    """Return transformers' name of a method: "activation checkpointing" since 5.23, "gradient checkpointing" before."""
    newer = name.format("activation")
    return newer if hasattr(model, newer) else name.format("gradient")
