"""Replacement for transformers' SDPA function that calls the same SDPA and then the hook point of the layer.

It is registered under SDPA's own name while any model is attached, so configurations need no change and
`set_attn_implementation("sdpa")` has no effect. Without listeners and edits it costs one dictionary lookup. Otherwise it
passes the parameters of the call on as `ScoreParams`. Arguments that it does not support raise an error, so that results are
never wrong.
"""

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.cache_step import attend_with_policies, has_pending_cache_step
from headwise.attached.layer import MARK, AttachedLayer, LayerMark, layer_of
from headwise.attached.masks import mask_dtype_min
from headwise.errors import HeadwiseError, UnsupportedModelError
from headwise.heads.hook_point import is_replaying
from headwise.kernels.masks import CausalMask, Mask
from headwise.kernels.score_bias import DenseBias
from headwise.kernels.score_params import ScoreParams, repeat_kv

SDPA_NAME = "sdpa"
ACTIVE: set[Any] = set()  # current attachments
# Supported arguments of the attention function. Arguments that the function's source does not mention have no effect.
SUPPORTED_KWARGS = {"dropout", "scaling", "is_causal", "position_bias"}
UNSUPPORTED_KWARGS = {
    "s_aux": "learned attention sinks",
    "softcap": "soft-capped scores",
    "output_attentions": "output_attentions=True, which SDPA ignores (use hw.attention_maps or hw.record)",
    "head_mask": "a head mask (use attached.heads[…].silenced() or .scaled(…))",
    "cache": "a paged cache",
}


def register_hooked_sdpa(attachment: Any) -> None:
    """Register our function as SDPA while an attachment exists."""
    from transformers import AttentionInterface

    ACTIVE.add(attachment)
    AttentionInterface.register(SDPA_NAME, sdpa_with_hooks)


def restore_sdpa(attachment: Any) -> None:
    """Restore SDPA after the last attachment ends."""
    from transformers import AttentionInterface

    ACTIVE.discard(attachment)
    if not ACTIVE:
        AttentionInterface.register(SDPA_NAME, _sdpa())


def route_module_to_layer(layer: AttachedLayer, attention_function: Callable[..., Any] | None) -> None:
    """Route calls of a layer's module to the layer. `attention_function` is the module's own function; None for SDPA."""
    layer.source_words = _identifiers_in_source_code(_sdpa() if attention_function is None else attention_function)
    layer.module.__dict__[MARK] = LayerMark(layer)


def stop_routing_module(layer: AttachedLayer) -> None:
    """Stop routing calls of a layer's module to the layer."""
    layer.module.__dict__.pop(MARK, None)


def has_third_party_sdpa() -> bool:
    """Return whether another library has replaced SDPA."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[SDPA_NAME] not in (sdpa_with_hooks, _sdpa())


def _sdpa() -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def sdpa_with_hooks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Run SDPA and apply hooks: (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, T, H, e), without attention weights."""
    layer = layer_of(module)
    if layer is None:  # a model that is not attached
        return _sdpa()(module, query, key, value, attention_mask, **kwargs)
    _check_kwargs(layer, kwargs, _sdpa())
    if layer.spec.cache or has_pending_cache_step():

        def make_policy_params(num_keys: int) -> ScoreParams:
            return _score_params(layer, query, key, attention_mask, kwargs, num_keys)

        return _attend_with_policies(layer, query, key, value, make_policy_params)
    kv_of_head = _uneven_kv_of_head(layer, query, key)
    keys, values = (key, value) if kv_of_head is None else (repeat_kv(key, kv_of_head), repeat_kv(value, kv_of_head))
    out, maps = _sdpa()(module, query, keys, values, attention_mask, **kwargs)  # (B, T, H, e)
    return apply_hooks(
        layer, query, key, value, lambda: _score_params(layer, query, key, attention_mask, kwargs), out
    ), maps


def eager_with_hooks(
    eager_function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run the eager function of a modeling file and apply hooks: (B, H, T, d) … → (B, T, H, e), and attention weights."""
    layer = layer_of(module)
    if layer is None or layer.info.backend != "eager":
        return eager_function(module, query, key, value, attention_mask, **kwargs)
    _check_kwargs(layer, kwargs, eager_function, SUPPORTED_KWARGS | {"softcap", "s_aux"})

    def make_params(num_keys: int | None = None) -> ScoreParams:
        # causality is already part of the mask
        params = _score_params(layer, query, key, attention_mask, kwargs | {"is_causal": False}, num_keys)
        sink = getattr(module, "sinks", kwargs.get("s_aux"))
        sink = sink.detach().flatten() if isinstance(sink, Tensor) else None
        return replace(params, softcap=kwargs.get("softcap"), sink=sink)

    if layer.spec.cache or has_pending_cache_step():
        return _attend_with_policies(layer, query, key, value, make_params)
    kv_of_head = _uneven_kv_of_head(layer, query, key)
    keys, values = (key, value) if kv_of_head is None else (repeat_kv(key, kv_of_head), repeat_kv(value, kv_of_head))
    out, maps = eager_function(module, query, keys, values, attention_mask, **kwargs)
    return apply_hooks(layer, query, key, value, make_params, out), maps


def _attend_with_policies(
    layer: AttachedLayer, q: Tensor, k: Tensor, v: Tensor, make_params: Callable[[int], ScoreParams]
) -> tuple[Tensor, None]:
    """Attend in a layer with cache policies per KV head, and apply hooks: (B, H, T, d) … → (B, T, H, e)."""
    result = attend_with_policies(layer, q, k, v, make_params)
    out = result.z.transpose(1, 2).contiguous()  # (B, T, H, e)
    if not layer.hook_point.is_active and layer.probe is None:
        return out, None
    has_listeners = layer.hook_point.has_listeners
    keys, values = (result.keys, result.values) if has_listeners else (k, v)
    return apply_hooks(layer, q, keys, values, lambda: result.params, out), None


def apply_hooks(
    layer: AttachedLayer, q: Tensor, k: Tensor, v: Tensor, make_params: Callable[[], ScoreParams], out: Tensor
) -> Tensor:
    """Pass a call to the layer's probe or to its hook point: (B, T, H, e) → (B, T, H, e)."""
    if layer.probe is not None:
        return layer.probe.on_attention(q, k, v, out, make_params)
    if not torch.compiler.is_compiling() and in_backward() and not is_replaying():
        layer.check_replay_unedited(q)  # a user's own checkpoint runs again: no listeners, no edits
        return out
    if not layer.hook_point.is_active:
        return out
    return layer.apply_hook_point(q, k, v, make_params, out)


def in_backward() -> bool:
    """Return whether a backward pass is running, so that a forward pass is the recomputation of a checkpoint."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]


def _check_kwargs(
    layer: AttachedLayer,
    kwargs: dict[str, Any],
    function: Callable[..., Any],
    supported: Collection[str] = SUPPORTED_KWARGS,
) -> None:
    """Raise an error for an argument of `function` that affects scores and is not supported."""
    for name, value in kwargs.items():
        if name in supported or value is None or value is False:
            continue
        if name not in UNSUPPORTED_KWARGS and layer.source_words is not None and name not in layer.source_words:
            continue
        reason = UNSUPPORTED_KWARGS.get(name, f"the unknown argument {name!r} of {function.__name__}")
        raise UnsupportedModelError(
            f"{layer.info.name}: its attention was called with {reason}. This is not supported while the model is attached, "
            f"because recorded values would be wrong."
        )


@cache
def _identifiers_in_source_code(run: Callable[..., Any]) -> frozenset[str] | None:
    """Return the words in the source of a function; None if its source cannot be read."""
    try:
        return frozenset(re.findall(r"\w+", inspect.getsource(run)))
    except (OSError, TypeError):
        return None


def _uneven_kv_of_head(layer: AttachedLayer, query: Tensor, key: Tensor) -> tuple[int, ...] | None:
    """Return the KV head of each head if pruning has left groups of different sizes, which transformers does not support."""
    kv_of_head = layer.spec.kv_of_head
    H, K = query.shape[1], key.shape[1]
    return kv_of_head if layer.has_uneven_groups and len(kv_of_head) == H and len(layer.spec.kv_head_ids) == K else None


@torch.no_grad()  # saves nothing for the backward pass, so that a checkpoint may repeat a call without listeners
def _score_params(
    layer: AttachedLayer,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
    num_keys: int | None = None,
) -> ScoreParams:
    """Return the mask, bias, scale and KV heads of a call over the tokens of `key`, or over this number of tokens."""
    (H, T, d), (K, S) = query.shape[1:], key.shape[1:3]
    S = S if num_keys is None else num_keys
    kv_of_head = tuple(range(H)) if K == H else layer.spec.kv_of_head
    if len(kv_of_head) != H or len(layer.spec.head_ids) != H or (kv_of_head and max(kv_of_head) >= K):
        raise HeadwiseError(
            f"{layer.info.name}: its attention was called with {H} heads and {K} KV heads, expected "
            f"{len(layer.spec.head_ids)} and {len(layer.spec.kv_head_ids)}. If the model was changed after attaching, "
            f"detach and attach it again."
        )
    scale = kwargs.get("scaling")
    causal = kwargs.get("is_causal")
    causal = getattr(layer.module, "is_causal", True) if causal is None else causal
    bias: Tensor | None = kwargs.get("position_bias")
    if mask is None:
        # SDPA's own causal flag aligns the mask with the upper left corner.
        score_mask: Mask | None = CausalMask(0) if causal and T > 1 else None
    elif mask.dtype == torch.bool:
        score_mask = layer.mask_converter.convert(mask, T, S)
    else:
        score_mask = layer.mask_converter.convert(mask, T, S)
        extra_bias = mask.masked_fill(mask <= mask_dtype_min(mask) / 2, 0)
        bias = (
            (extra_bias if bias is None else bias + extra_bias) if bool(extra_bias.any()) or bias is not None else None
        )
    if bias is not None and bias.ndim != 4:
        raise UnsupportedModelError(
            f"{layer.info.name}: the position bias must have four axes. Got shape {tuple(bias.shape)}."
        )
    return ScoreParams(
        d**-0.5 if scale is None else float(scale), kv_of_head, score_mask, None if bias is None else DenseBias(bias)
    )
