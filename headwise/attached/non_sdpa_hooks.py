"""Hooks for attention that does not run on SDPA.

*eager*: modules on transformers' interface whose model does not support SDPA (learned sinks, soft-capped scores …). While
such a module is attached, our function replaces the eager function in its modeling file. It calls the original function and
then the hook point.

*traced*: modules that are not on the interface, listed in a table. While one is called, its matmuls are traced: the scores
that enter softmax, and the product of attention weights and values, which is z. The computation itself is not changed.

When a model is attached, `layer_probe.py` compares the reconstructed attention with the outputs of a call, and raises an
error if they differ.
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

from headwise.attached.cache_step import has_pending_cache_step, hide_evicted_keys
from headwise.attached.hooked_sdpa import apply_hooks, eager_with_hooks
from headwise.attached.layer import AttachedLayer
from headwise.attached.masks import mask_dtype_min
from headwise.attached.uncopied_hook import UncopiedHook
from headwise.errors import UnsupportedModelError
from headwise.kernels.masks import CausalMask, DenseMask, Mask
from headwise.kernels.score_bias import DenseBias
from headwise.kernels.score_params import ScoreParams

EAGER_FUNCTION_NAME = "eager_attention_forward"
_SOFTMAX = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax}
_MATMULS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__}
_BADDBMMS = {torch.baddbmm, Tensor.baddbmm}
_SDPA = torch.nn.functional.scaled_dot_product_attention
HIDDEN_SCORE_FACTOR = (
    32  # scores below the minimum of their dtype divided by this are hidden; CodeGen divides after masking
)


@cache
def has_eager_function(module_class: type[nn.Module]) -> bool:
    """Return whether a class passes the eager function of its own file to the interface."""
    try:
        source = inspect.getsource(module_class.forward)
    except (OSError, TypeError):
        return False
    return (
        EAGER_FUNCTION_NAME in module_class.forward.__globals__
        and re.search(rf"get_interface\([^()]*,\s*{EAGER_FUNCTION_NAME}\s*,?\s*\)", source) is not None
    )


def eager_function_of(layer: AttachedLayer) -> Callable[..., Any] | None:
    """Return the eager function in the modeling file of a layer's module; None if the layer runs on another function."""
    if layer.info.backend != "eager" or not layer.spec.head_ids:
        return None
    function = type(layer.module).forward.__globals__[EAGER_FUNCTION_NAME]
    return function.args[0] if isinstance(function, partial) else function


def install_attention_hooks(layer: AttachedLayer) -> list[Any]:
    """Install hooks for a layer that does not run on SDPA. Each returned hook has `.remove()`."""
    if layer.info.backend == "sdpa" or not layer.spec.head_ids:
        return []
    if layer.info.backend == "eager":
        return [EagerAttentionPatch(type(layer.module))]
    hook = TracedAttentionHook(layer)
    module = layer.module
    return [
        module.register_forward_pre_hook(UncopiedHook(hook.start_trace)),
        module.register_forward_hook(UncopiedHook(hook.end_trace), always_call=True),
    ]


class EagerAttentionPatch:
    """Replaces the eager function in the modeling file of an attention class until `remove`.

    The original function is restored with the last hook. Modules that are not attached run the original function, so threads
    and models of the same family do not affect each other.
    """

    _lock = threading.Lock()

    def __init__(self, kind: type[nn.Module]) -> None:
        self._names: dict[str, Any] = kind.forward.__globals__
        self._is_open = False
        with self._lock:
            if not isinstance(self._names[EAGER_FUNCTION_NAME], partial):
                self._names[EAGER_FUNCTION_NAME] = partial(eager_with_hooks, self._names[EAGER_FUNCTION_NAME])
            count = vars(self._names[EAGER_FUNCTION_NAME])
            count["hooks"] = count.get("hooks", 0) + 1
            self._is_open = True

    def remove(self) -> None:
        """Remove the hook."""
        with self._lock:
            if self._is_open:
                function = self._names[EAGER_FUNCTION_NAME]
                vars(function)["hooks"] -= 1
                if not vars(function)["hooks"]:
                    self._names[EAGER_FUNCTION_NAME] = function.args[0]
            self._is_open = False

    def __del__(self) -> None:  # an interrupted attach may have lost the hook
        self.remove()


class TracedAttentionHook:
    """Traces the matmuls of a module while it is called."""

    def __init__(self, layer: AttachedLayer) -> None:
        self._layer = layer
        self._traces: list[AttentionTracingMode] = []

    def start_trace(self, *_: Any) -> None:
        """Start tracing, before the module is called."""
        _pop_tracing_modes()  # those of an interrupted call
        self._traces.clear()
        trace = AttentionTracingMode(self._layer)
        trace.__enter__()
        self._traces.append(trace)

    def end_trace(self, *_: Any) -> None:
        """Stop tracing, after the call, also after an error."""
        if self._traces:
            self._traces.pop().__exit__(None, None, None)


class AttentionTracingMode(TorchFunctionMode):
    """Trace of one call of a module: queries and keys, scores before softmax, and weights times values."""

    def __init__(self, layer: AttachedLayer) -> None:
        super().__init__()
        self._layer = layer
        # Matmuls so far: (…, T, d), (…, d, S), and a scale.
        self._matmul_pairs: list[tuple[Tensor, Tensor, float]] = []
        self._score_pair: tuple[Tensor, Tensor, float] | None = None  # the matmul that computed the scores
        self._scores: Tensor | None = None
        self._weights: Tensor | None = None
        self._streaming_weights: Tensor | None = None  # weights with evicted tokens hidden, while gates are learned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function and record it."""
        kwargs = kwargs or {}
        has_policies = bool(self._layer.spec.cache) or has_pending_cache_step()
        if func is _SDPA:
            args, kwargs = _with_visible_keys(self._layer, args, kwargs) if has_policies else (args, kwargs)
            return self._on_sdpa(func(*args, **kwargs), *args, **kwargs)
        if func in _SOFTMAX and has_policies and self._weights is None and args[0].ndim > 2:
            args = self._hide_evicted(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in _SOFTMAX and self._weights is None and result.ndim > 2:
            self._score_pair = next(
                (pair for pair in self._matmul_pairs if _matmul_matches_weights_shape(pair, result)), None
            )
            if self._score_pair is not None:
                self._scores, self._weights = args[0], result
        elif func in _BADDBMMS and self._weights is None:
            arguments = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
            self._matmul_pairs.append((arguments["batch1"], arguments["batch2"], float(arguments.get("alpha", 1.0))))
        elif func in _MATMULS and self._weights is None:
            self._matmul_pairs.append((args[0], args[1], 1.0))
        elif func in _MATMULS and self._scores is not None and self._is_weights(args[0]):
            if self._streaming_weights is not None:
                result = self._interpolate(func, args, result)
            return self._on_value_matmul(args[1], result)
        return result

    def _interpolate(self, func: Any, args: Any, full: Tensor) -> Tensor:
        """Return z between streaming (gate 0) and all tokens (gate 1)."""
        assert self._streaming_weights is not None and self._layer.cache_gate is not None  # noqa: PT018
        streaming = func(self._streaming_weights.to(args[0].dtype).reshape(args[0].shape), args[1])
        gate = self._layer.cache_gate[:, list(self._layer.spec.kv_of_head), None, None].to(full)  # (B, H, 1, 1)
        H = len(self._layer.spec.head_ids)
        split, split_full = _split_batch_and_heads(streaming, H), _split_batch_and_heads(full, H)
        return (split + gate * (split_full - split)).reshape(full.shape)

    def _hide_evicted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments of softmax with the scores of evicted tokens hidden."""
        scores = args[0]
        if not any(_matmul_matches_weights_shape(pair, scores) for pair in self._matmul_pairs):
            return args
        split = _split_batch_and_heads(scores, len(self._layer.spec.head_ids))
        masked = hide_evicted_keys(self._layer, split, split > mask_dtype_min(split) / HIDDEN_SCORE_FACTOR)
        if masked is None:
            return args
        if self._layer.cache_gate is not None:
            self._streaming_weights = func(masked.reshape(scores.shape), *args[1:], **kwargs)
            return args
        return (masked.reshape(scores.shape), *args[1:])

    def _is_weights(self, tensor: Tensor) -> bool:
        assert self._weights is not None
        return tensor.numel() == self._weights.numel() and tensor.shape[-2:] == self._weights.shape[-2:]

    def _on_value_matmul(self, value: Tensor, result: Tensor) -> Tensor:
        """Apply hooks to weights times values, which is z, (…, T, e)."""
        assert self._score_pair is not None and self._scores is not None  # noqa: PT018
        H = len(self._layer.spec.head_ids)
        q, k, v, z = (
            _split_batch_and_heads(x, H) for x in (self._score_pair[0], self._score_pair[1].mT, value, result)
        )
        q, k = q.to(v.dtype), k.to(v.dtype)  # some models cast q and k for the matmul only
        scores, scale = _split_batch_and_heads(self._scores, H), self._score_pair[2]
        self._scores = None
        return self._apply_hooks(q, k, v, lambda: _score_params(q, k, scores, scale), z, result)

    def _on_sdpa(
        self, result: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *_: Any, **kwargs: Any
    ) -> Tensor:
        """Apply hooks to a direct call of SDPA by the module."""
        H = q.shape[1]
        scale = kwargs.get("scale")
        mask: Mask | None = CausalMask(0) if kwargs.get("is_causal") else None
        bias = None
        if attn_mask is not None:
            mask, bias = mask_and_bias(attn_mask)
        kv_of_head = tuple(head * k.shape[1] // H for head in range(H))
        params = ScoreParams(q.shape[-1] ** -0.5 if scale is None else float(scale), kv_of_head, mask, bias)
        return self._apply_hooks(q, k, v, lambda: params, result, result)

    def _apply_hooks(self, q: Tensor, k: Tensor, v: Tensor, make_params: Any, z: Tensor, result: Tensor) -> Tensor:
        out = z.transpose(1, 2)  # (B, T, H, e)
        edited = apply_hooks(self._layer, q, k, v, make_params, out)
        return result if edited is out else edited.transpose(1, 2).reshape(result.shape)


def _with_visible_keys(layer: AttachedLayer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a direct call of SDPA with evicted tokens hidden."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    q, k = kwargs.pop("query"), kwargs.pop("key")
    T, S = q.shape[2], k.shape[2]
    mask = kwargs.get("attn_mask")
    if mask is None:
        allowed = q.new_ones(1, 1, T, S, dtype=torch.bool)
        allowed = allowed.tril(0) if kwargs.get("is_causal") else allowed
    else:
        allowed = mask if mask.dtype == torch.bool else mask > mask_dtype_min(mask) / 2
    if layer.cache_gate is not None:
        raise UnsupportedModelError(
            f"{layer.info.name}: gates cannot be learned in a layer that calls SDPA itself. Use another ranking method."
        )
    scores = (
        torch.zeros(1, 1, T, S, dtype=q.dtype, device=q.device) if mask is None or mask.dtype == torch.bool else mask
    )
    masked = hide_evicted_keys(layer, scores.masked_fill(~allowed, mask_dtype_min(scores)), allowed)
    if masked is not None:
        kwargs |= {"attn_mask": masked, "is_causal": False}
    return (q, k, kwargs.pop("value")), kwargs


def close_traces() -> None:
    """End the traces of interrupted calls: torch runs no hooks after Ctrl-C."""
    _pop_tracing_modes()


def _pop_tracing_modes() -> None:
    while isinstance(_get_current_function_mode(), AttentionTracingMode):
        _pop_mode()


def _matmul_matches_weights_shape(pair: tuple[Tensor, Tensor, float], weights: Tensor) -> bool:
    """Return whether a matmul has the shape of these weights."""
    left, right, _ = pair
    return (left.shape[-2], right.shape[-1]) == weights.shape[-2:] and left.numel() // left.shape[-1] * weights.shape[
        -1
    ] == weights.numel()


def _split_batch_and_heads(x: Tensor, H: int) -> Tensor:
    """Split the batch axis: (B·H, …) → (B, H, …). Four axes are unchanged."""
    return x if x.ndim == 4 else x.unflatten(0, (-1, H))


def mask_and_bias(mask: Tensor) -> tuple[Mask, DenseBias | None]:
    """Split a mask tensor into the keys that are visible and the numbers added to their scores."""
    if mask.dtype == torch.bool:
        return DenseMask(mask), None
    allowed = mask > mask_dtype_min(mask) / 2
    bias = mask.masked_fill(~allowed, 0)
    return DenseMask(allowed), DenseBias(bias) if bool(bias.any()) else None


@torch.no_grad()
def _score_params(q: Tensor, k: Tensor, scores: Tensor, scale: float) -> ScoreParams:
    """Derive score parameters from queries, keys and recorded scores. The difference from q·k is a bias."""
    kv_of_head = tuple(head * k.shape[1] // q.shape[1] for head in range(q.shape[1]))
    products = (q.to(scores.dtype) * scale) @ k.to(scores.dtype).mT  # (B, H, T, S)
    allowed = scores > mask_dtype_min(scores) / 2
    bias = (scores - products).masked_fill(~allowed, 0)
    return ScoreParams(scale, kv_of_head, DenseMask(allowed), DenseBias(bias))
