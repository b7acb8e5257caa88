"""What stays at a module from which heads were cut, attached or not: where it meets numbers of heads that are gone.

A norm over all heads goes on to see them all, and what it gives is of those that are there. A position bias that one layer
makes and hands on to the next ones is handed on whole, and each layer sees its own heads' part. Copies of a model, and what
is pickled of it, keep them.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

POSITION_BIAS, BIAS_TABLE = "position_bias", "relative_attention_bias"


class SelectChannelsHook:
    """Behind a norm over all heads: the channels of those that are there."""

    def __init__(self, channels: list[int]) -> None:
        self.channels = channels

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """(…, all channels) → (…, channels)"""
        return output[..., torch.tensor(self.channels, device=output.device)]


class PositionBiasSliceHook:
    """At a module that shares its position bias with others: it sees the part of its heads, and hands on the whole."""

    def __init__(self, head_indices: list[int], head_count: int) -> None:
        self.head_indices, self.head_count = head_indices, head_count
        self._full_bias: Tensor | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the module: the bias it is given."""
        names = list(inspect.signature(module.forward).parameters)
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        self._full_bias = kwargs.get(POSITION_BIAS)
        return None if self._full_bias is None else ((), kwargs | {POSITION_BIAS: self._slice(self._full_bias)})

    def after_table(self, module: nn.Module, inputs: Any, biases: Tensor) -> Tensor:
        """Behind its own table of biases, (T, S, heads)."""
        self._full_bias = biases.permute(2, 0, 1)[None]  # (1, heads, T, S)
        return biases[..., torch.tensor(self.head_indices, device=biases.device)]

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Behind the module: what it hands on, zeros where it has no bias."""
        if not isinstance(output, tuple) or len(output) < 2 or not isinstance(own_bias := output[1], Tensor):
            self._full_bias = None
            return None  # it hands nothing on
        full_bias, self._full_bias = (
            own_bias[:, :1].expand(-1, self.head_count, -1, -1) if self._full_bias is None else self._full_bias,
            None,
        )
        return (output[0], full_bias, *output[2:])

    def _slice(self, bias: Tensor) -> Tensor:
        return bias if bias.shape[1] == 1 else bias[:, torch.tensor(self.head_indices, device=bias.device)]


def is_prune_hook(hook: Any) -> bool:
    """Whether a hook of a module is one of these."""
    return isinstance(hook, SelectChannelsHook) or isinstance(getattr(hook, "__self__", None), PositionBiasSliceHook)


def shares_position_bias(module: nn.Module) -> bool:
    """Whether a module is given a position bias, or makes one, and hands it on."""
    return POSITION_BIAS in inspect.signature(module.forward).parameters


def hook_norm_channels(norm: nn.Module, head_indices: list[int], head_count: int) -> None:
    """Let some of so many heads that a norm gives now go on."""
    hooks = norm._forward_hooks
    key = next((key for key, hook in hooks.items() if isinstance(hook, SelectChannelsHook)), None)
    channels = list(range(norm.weight.shape[0])) if key is None else hooks[key].channels  # pyright: ignore
    head_channels = len(channels) // head_count
    selection_hook = SelectChannelsHook(
        [channels[head * head_channels + offset] for head in head_indices for offset in range(head_channels)]
    )
    if key is None:
        norm.register_forward_hook(selection_hook)
    else:
        hooks[key] = selection_hook


def hook_bias_heads(module: nn.Module, head_indices: list[int], head_count: int) -> None:
    """Let a module see the part of the bias that is of some of so many heads it has now."""
    previous = next((hook.__self__ for hook in module._forward_hooks.values() if is_prune_hook(hook)), None)  # pyright: ignore
    if isinstance(previous, PositionBiasSliceHook):
        slice_hook = PositionBiasSliceHook([previous.head_indices[head] for head in head_indices], previous.head_count)
    else:
        slice_hook = PositionBiasSliceHook(head_indices, head_count)
    table = getattr(module, BIAS_TABLE, None)
    for hooked_module in (module, *([] if table is None else [table])):
        for hooks in (hooked_module._forward_hooks, hooked_module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if is_prune_hook(hook)]:
                del hooks[key]
    module.register_forward_pre_hook(slice_hook.enter, with_kwargs=True)
    module.register_forward_hook(slice_hook.leave)
    if table is not None:
        table.register_forward_hook(slice_hook.after_table)


def prune_hooks_of(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Such hooks of a module now, by kind."""
    kinds = [name for name in module.__dict__ if name in ("_forward_hooks", "_forward_pre_hooks")]
    return {name: {key: hook for key, hook in module.__dict__[name].items() if is_prune_hook(hook)} for name in kinds}


def restore_prune_hooks(module: nn.Module, saved: dict[str, dict[int, Any]]) -> None:
    """Leave a module with those it had."""
    for name, hooks in saved.items():
        current = module.__dict__[name]
        for key in [key for key, hook in current.items() if is_prune_hook(hook)]:
            del current[key]
        current.update(hooks)
