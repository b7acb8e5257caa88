"""What stays at a module from which heads were cut, attached or not: where it meets numbers of heads that are gone.

A norm over all heads goes on to see them all, and what it gives is of those that are there. A position bias that one layer
makes and hands on to the next ones is handed on whole, and each layer sees its own heads' part. Copies of a model, and what
is pickled of it, keep them.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

BIAS, TABLE = "position_bias", "relative_attention_bias"


class OfThose:
    """Behind a norm over all heads: the channels of those that are there."""

    def __init__(self, places: list[int]) -> None:
        self.places = places

    def __call__(self, module: nn.Module, given: Any, made: Tensor) -> Tensor:
        """(…, all channels) → (…, channels)"""
        return made[..., torch.tensor(self.places, device=made.device)]


class PartOfBias:
    """At a module that shares its position bias with others: it sees the part of its heads, and hands on the whole."""

    def __init__(self, places: list[int], count: int) -> None:
        self.places, self.count = places, count
        self._whole: Tensor | None = None

    def enter(self, module: nn.Module, given: Any, named: dict[str, Any]) -> Any:
        """Before the module: the bias it is given."""
        names = list(inspect.signature(module.forward).parameters)
        named = dict(zip(names, given, strict=False)) | named
        self._whole = named.get(BIAS)
        return None if self._whole is None else ((), named | {BIAS: self._part(self._whole)})

    def look_up(self, module: nn.Module, given: Any, made: Tensor) -> Tensor:
        """Behind its own table of biases, (T, S, heads)."""
        self._whole = made.permute(2, 0, 1)[None]  # (1, heads, T, S)
        return made[..., torch.tensor(self.places, device=made.device)]

    def leave(self, module: nn.Module, given: Any, made: Any) -> Any:
        """Behind the module: what it hands on, zeros where it has no bias."""
        if not isinstance(made, tuple) or len(made) < 2 or not isinstance(own := made[1], Tensor):
            self._whole = None
            return None  # it hands nothing on
        whole, self._whole = own[:, :1].expand(-1, self.count, -1, -1) if self._whole is None else self._whole, None
        return (made[0], whole, *made[2:])

    def _part(self, bias: Tensor) -> Tensor:
        return bias if bias.shape[1] == 1 else bias[:, torch.tensor(self.places, device=bias.device)]


def is_standing(hook: Any) -> bool:
    """Whether a hook of a module is one of these."""
    return isinstance(hook, OfThose) or isinstance(getattr(hook, "__self__", None), PartOfBias)


def shares_bias(module: nn.Module) -> bool:
    """Whether a module is given a position bias, or makes one, and hands it on."""
    return BIAS in inspect.signature(module.forward).parameters


def stand_behind(norm: nn.Module, chosen: list[int], count: int) -> None:
    """Let some of so many heads that a norm gives now go on."""
    hooks = norm._forward_hooks
    key = next((key for key, hook in hooks.items() if isinstance(hook, OfThose)), None)
    there = list(range(norm.weight.shape[0])) if key is None else hooks[key].places  # pyright: ignore
    each = len(there) // count
    stands = OfThose([there[head * each + place] for head in chosen for place in range(each)])
    if key is None:
        norm.register_forward_hook(stands)
    else:
        hooks[key] = stands


def stand_at(module: nn.Module, chosen: list[int], count: int) -> None:
    """Let a module see the part of the bias that is of some of so many heads it has now."""
    old = next((hook.__self__ for hook in module._forward_hooks.values() if is_standing(hook)), None)  # pyright: ignore
    if isinstance(old, PartOfBias):
        stands = PartOfBias([old.places[head] for head in chosen], old.count)
    else:
        stands = PartOfBias(chosen, count)
    table = getattr(module, TABLE, None)
    for part in (module, *([] if table is None else [table])):
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if is_standing(hook)]:
                del hooks[key]
    module.register_forward_pre_hook(stands.enter, with_kwargs=True)
    module.register_forward_hook(stands.leave)
    if table is not None:
        table.register_forward_hook(stands.look_up)


def standing(part: nn.Module) -> dict[str, dict[int, Any]]:
    """Such hooks of a module now, by kind."""
    kinds = [name for name in part.__dict__ if name in ("_forward_hooks", "_forward_pre_hooks")]
    return {name: {key: hook for key, hook in part.__dict__[name].items() if is_standing(hook)} for name in kinds}


def stand_again(part: nn.Module, were: dict[str, dict[int, Any]]) -> None:
    """Leave a module with those it had."""
    for name, hooks in were.items():
        there = part.__dict__[name]
        for key in [key for key, hook in there.items() if is_standing(hook)]:
            del there[key]
        there.update(hooks)
