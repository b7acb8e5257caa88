"""Attention that is not on SDPA: reached from around its module, for as long as the module is called.

*eager*: modules on transformers' interface whose model has no SDPA (learned sinks, capped scores …). While such a module is
attached, our function stands in its file for the eager one; it calls exactly the function of the file, then the site.

*watched*: modules that are not on the interface at all, named in a table. While one is called, its products are watched: the
scores that enter its softmax, and what comes of its weights times the values, which is z. Nothing is computed otherwise.

What was rebuilt from either is held against the numbers of a call when a model is attached (`trial.py`), and refused if it
does not give them.
"""

import inspect
import re
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode

from headwise.attached.hooks import Hook
from headwise.attached.interface import attend_eager, pass_site
from headwise.attached.layer import Layer
from headwise.attached.masks import lowest
from headwise.kernels.bias import Given
from headwise.kernels.masks import Allow, Causal, Mask
from headwise.kernels.score_params import Terms

OWN = "eager_attention_forward"
_SOFTMAX = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax}
_PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
_ADDED = {torch.baddbmm, Tensor.baddbmm}
_SDPA = torch.nn.functional.scaled_dot_product_attention


@cache
def brings_eager(kind: type[nn.Module]) -> bool:
    """Whether a class hands the interface the eager function of its own file."""
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False
    return (
        OWN in kind.forward.__globals__ and re.search(rf"get_interface\([^()]*,\s*{OWN}\s*,?\s*\)", source) is not None
    )


def own_eager(layer: Layer) -> Callable[..., Any] | None:
    """The eager function of the file that the module of a layer is from; None if the layer runs on another."""
    if layer.found.way != "eager" or not layer.spec.head_ids:
        return None
    function = type(layer.module).forward.__globals__[OWN]
    return function.args[0] if isinstance(function, partial) else function


def hooks_around(layer: Layer) -> list[Any]:
    """Hooks around a layer's module, each with `.remove()`; none where it runs on SDPA."""
    if layer.found.way == "sdpa" or not layer.spec.head_ids:
        return []
    if layer.found.way == "eager":
        return [EagerHook(type(layer.module))]
    around = Watching(layer)
    module = layer.module
    return [
        module.register_forward_pre_hook(Hook(around.enter)),
        module.register_forward_hook(Hook(around.leave), always_call=True),
    ]


class EagerHook:
    """Until `remove`, our function stands for the eager one in the file of an attention class.

    The function of the file comes back with the last hook. Modules that are not attached run the function of the file, so
    threads, and models of the same family, do not disturb each other.
    """

    _lock = threading.Lock()

    def __init__(self, kind: type[nn.Module]) -> None:
        self._names: dict[str, Any] = kind.forward.__globals__
        self._is_open = False
        with self._lock:
            if not isinstance(self._names[OWN], partial):
                self._names[OWN] = partial(attend_eager, self._names[OWN])
            count = vars(self._names[OWN])
            count["hooks"] = count.get("hooks", 0) + 1
            self._is_open = True

    def remove(self) -> None:
        """Take the hook away."""
        with self._lock:
            if self._is_open:
                function = self._names[OWN]
                vars(function)["hooks"] -= 1
                if not vars(function)["hooks"]:
                    self._names[OWN] = function.args[0]
            self._is_open = False

    def __del__(self) -> None:  # an attach that was interrupted may have dropped the hook
        self.remove()


class Watching:
    """While a module is called, its products pass by."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._modes: list[CallTrace] = []

    def enter(self, *_: Any) -> None:
        """Before the module."""
        _pop_traces()  # of a call that was interrupted
        self._modes.clear()
        mode = CallTrace(self._layer)
        mode.__enter__()
        self._modes.append(mode)

    def leave(self, *_: Any) -> None:
        """Behind it, also after an error."""
        if self._modes:
            self._modes.pop().__exit__(None, None, None)


class CallTrace(TorchFunctionMode):
    """One call of a module: queries and keys, the scores that enter softmax, weights times values."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer
        self._pairs: list[tuple[Tensor, Tensor, float]] = []  # (…, T, d), (…, d, S), and a scale: products so far
        self._pair: tuple[Tensor, Tensor, float] | None = None  # the one that scores are of
        self._scores: Tensor | None = None
        self._weights: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run what is asked, and look at it."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func is _SDPA:
            return self._fused(made, *args, **kwargs)
        if func in _SOFTMAX and self._weights is None and made.ndim > 2:
            self._pair = next((pair for pair in self._pairs if _gives(pair, made)), None)
            if self._pair is not None:
                self._scores, self._weights = args[0], made
        elif func in _ADDED and self._weights is None:
            told = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
            self._pairs.append((told["batch1"], told["batch2"], float(told.get("alpha", 1.0))))
        elif func in _PRODUCTS and self._weights is None:
            self._pairs.append((args[0], args[1], 1.0))
        elif func in _PRODUCTS and self._scores is not None and self._is_weights(args[0]):
            return self._product(args[1], made)
        return made

    def _is_weights(self, given: Tensor) -> bool:
        assert self._weights is not None
        return given.numel() == self._weights.numel() and given.shape[-2:] == self._weights.shape[-2:]

    def _product(self, value: Tensor, made: Tensor) -> Tensor:
        """Weights times values: z, (…, T, e)."""
        assert self._pair is not None and self._scores is not None  # noqa: PT018
        H = len(self._layer.spec.head_ids)
        q, k, v, z = (_by_head(x, H) for x in (self._pair[0], self._pair[1].mT, value, made))
        q, k = q.to(v.dtype), k.to(v.dtype)  # some are cast for the product alone
        scores, scale = _by_head(self._scores, H), self._pair[2]
        self._scores = None
        return self._pass_on(q, k, v, lambda: _terms(q, k, scores, scale), z, made)

    def _fused(
        self, made: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *_: Any, **more: Any
    ) -> Tensor:
        """SDPA, called by the module itself."""
        H = q.shape[1]
        scale = more.get("scale")
        told: Mask | None = Causal(0) if more.get("is_causal") else None
        bias = None
        if attn_mask is not None:
            told, bias = _mask_and_bias(attn_mask)
        groups = tuple(head * k.shape[1] // H for head in range(H))
        terms = Terms(q.shape[-1] ** -0.5 if scale is None else float(scale), groups, told, bias)
        return self._pass_on(q, k, v, lambda: terms, made, made)

    def _pass_on(self, q: Tensor, k: Tensor, v: Tensor, terms: Any, z: Tensor, made: Tensor) -> Tensor:
        out = z.transpose(1, 2)  # (B, T, H, e)
        passed = pass_site(self._layer, q, k, v, terms, out)
        return made if passed is out else passed.transpose(1, 2).reshape(made.shape)


def close_traces() -> None:
    """End the traces of calls that were interrupted: torch calls no hook after a Ctrl-C."""
    _pop_traces()


def _pop_traces() -> None:
    while isinstance(_get_current_function_mode(), CallTrace):
        _pop_mode()


def _gives(pair: tuple[Tensor, Tensor, float], made: Tensor) -> bool:
    """Whether a product is as large as these weights."""
    left, right, _ = pair
    return (left.shape[-2], right.shape[-1]) == made.shape[-2:] and left.numel() // left.shape[-1] * made.shape[
        -1
    ] == made.numel()


def _by_head(x: Tensor, H: int) -> Tensor:
    """(B·H, …) → (B, H, …); four axes stay as they are."""
    return x if x.ndim == 4 else x.unflatten(0, (-1, H))


def _mask_and_bias(mask: Tensor) -> tuple[Mask, Given | None]:
    if mask.dtype == torch.bool:
        return Allow(mask), None
    allowed = mask > lowest(mask) / 2
    more = mask.masked_fill(~allowed, 0)
    return Allow(allowed), Given(more) if bool(more.any()) else None


@torch.no_grad()
def _terms(q: Tensor, k: Tensor, scores: Tensor, scale: float) -> Terms:
    """What makes the scores that were seen of queries and keys: the rest of them is a bias."""
    groups = tuple(head * k.shape[1] // q.shape[1] for head in range(q.shape[1]))
    products = (q.to(scores.dtype) * scale) @ k.to(scores.dtype).mT  # (B, H, T, S)
    allowed = scores > lowest(scores) / 2
    rest = (scores - products).masked_fill(~allowed, 0)
    return Terms(scale, groups, Allow(allowed), Given(rest))
