"""Training mode and activation checkpointing of an attached model."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headwise.heads.hook_point import HOOKS, replaying


class TrainModeAndCheckpointingMixin(nn.Module):
    """Training mode and activation checkpointing of a handle, delegated to its model."""

    model: Any
    attention_layers: Callable[[], list[Any]]

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

    @contextmanager
    def recompute_blocks(self) -> Iterator[None]:
        """Recompute the activations of blocks in the backward pass while the context is open, instead of storing them.

        Unlike `checkpointing`, this does not depend on training mode.
        """
        blocks = self._blocks()
        own_forwards = [block.__dict__.get("forward") for block in blocks]
        for block in blocks:
            block.__dict__["forward"] = partial(_checkpointed_call, block.forward)
        try:
            yield
        finally:
            for block, own_forward in zip(blocks, own_forwards, strict=True):
                block.__dict__.pop("forward")
                if own_forward is not None:
                    block.__dict__["forward"] = own_forward

    def _blocks(self) -> list[nn.Module]:
        return blocks_with_attention(self.model, self.attention_layers())


def blocks_with_attention(model: nn.Module, layers: Sequence[Any]) -> list[nn.Module]:
    """Return the blocks that contain attention layers: the first numbered module on the path of each layer."""
    matches = [re.match(r"(.*?(?:^|\.)\d+)(?:\.|$)", layer.info.name) for layer in layers]
    paths = dict.fromkeys(match[1] for match in matches if match is not None)
    return list(dict.fromkeys(model.get_submodule(path) for path in paths))


def _checkpointed_call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block whose activations are recomputed with the same edits of heads, and without listeners."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    hooks = HOOKS.now
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), replaying(hooks)), **kwargs
    )


def _checkpointing_name(model: Any, name: str) -> str:
    """Return transformers' name of a method: "activation checkpointing" since 5.23, "gradient checkpointing" before."""
    newer = name.format("activation")
    return newer if hasattr(model, newer) else name.format("gradient")
