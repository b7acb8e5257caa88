"""The function that transformers calls for every attention: the same SDPA as before, and then the hook point.

It stands under SDPA's own name while any model is attached, so that no configuration is touched: models that ask for the name
find it, and `set_attn_implementation("sdpa")` changes nothing. Where nobody looks, it adds one look into a dictionary. Where
somebody does, what the call was made of is passed on as `ScoreParams`; whatever it carries that SDPA would drop is refused,
so that no number is ever wrong.
"""

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.layer import MARK, AttachedLayer, LayerMark, layer_of
from headwise.attached.masks import mask_dtype_min
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import is_replaying
from headwise.kernels.masks import CausalMask, Mask
from headwise.kernels.score_bias import DenseBias
from headwise.kernels.score_params import ScoreParams, repeat_kv

SDPA_NAME = "sdpa"
ACTIVE: set[Any] = set()  # the attachments there are now
# What may come with a call: it is heeded here as there. Whatever else the function that runs never mentions changes nothing.
SUPPORTED_KWARGS = {"dropout", "scaling", "is_causal", "position_bias"}
UNSUPPORTED_KWARGS = {
    "s_aux": "learned sinks",
    "softcap": "capped scores",
    "output_attentions": "maps, which the fused path never makes; use hw.attention_maps or hw.record",
    "head_mask": "a mask of heads; use attached.heads[…].silenced() or .scaled(…)",
    "cache": "a paged cache",
}


def replace_sdpa(attachment: Any) -> None:
    """Put our function in SDPA's place, for as long as there is an attachment."""
    from transformers import AttentionInterface

    ACTIVE.add(attachment)
    AttentionInterface.register(SDPA_NAME, sdpa_with_hooks)


def restore_sdpa(attachment: Any) -> None:
    """Put SDPA back if no attachment is left."""
    from transformers import AttentionInterface

    ACTIVE.discard(attachment)
    if not ACTIVE:
        AttentionInterface.register(SDPA_NAME, _sdpa())


def register_layer(layer: AttachedLayer, attention_function: Callable[..., Any] | None) -> None:
    """Let calls of a layer's module reach the layer; `run` is the attention function of the module, None for SDPA."""
    layer.words = _words(_sdpa() if attention_function is None else attention_function)
    layer.module.__dict__[MARK] = LayerMark(layer)


def unregister_layer(layer: AttachedLayer) -> None:
    """Let calls of a layer's module pass by the layer."""
    layer.module.__dict__.pop(MARK, None)


def has_third_party_sdpa() -> bool:
    """Whether somebody else has put a function in SDPA's place."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[SDPA_NAME] not in (sdpa_with_hooks, _sdpa())


def _sdpa() -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def sdpa_with_hooks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """(B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, T, H, e), and no maps."""
    layer = layer_of(module)
    if layer is None:  # a model that is not attached
        return _sdpa()(module, query, key, value, attention_mask, **kwargs)
    _check_kwargs(layer, kwargs, _sdpa())
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
    """The eager function of a modeling file, and then the hook point: (B, H, T, d) … → (B, T, H, e), and its maps."""
    layer = layer_of(module)
    if layer is None or layer.info.backend != "eager":
        return eager_function(module, query, key, value, attention_mask, **kwargs)
    _check_kwargs(layer, kwargs, eager_function, SUPPORTED_KWARGS | {"softcap", "s_aux"})
    kv_of_head = _uneven_kv_of_head(layer, query, key)
    keys, values = (key, value) if kv_of_head is None else (repeat_kv(key, kv_of_head), repeat_kv(value, kv_of_head))
    out, maps = eager_function(module, query, keys, values, attention_mask, **kwargs)

    def make_params() -> ScoreParams:
        params = _score_params(layer, query, key, attention_mask, kwargs | {"is_causal": False})  # its mask says all
        sink = getattr(module, "sinks", kwargs.get("s_aux"))
        sink = sink.detach().flatten() if isinstance(sink, Tensor) else None
        return replace(params, softcap=kwargs.get("softcap"), sink=sink)

    return apply_hooks(layer, query, key, value, make_params, out), maps


def apply_hooks(
    layer: AttachedLayer, q: Tensor, k: Tensor, v: Tensor, make_params: Callable[[], ScoreParams], out: Tensor
) -> Tensor:
    """Show a call to whoever asks: the probe of a layer, or its hook point. (B, T, H, e) → (B, T, H, e)"""
    if layer.probe is not None:
        return layer.probe.on_attention(q, k, v, out, make_params)
    if not torch.compiler.is_compiling() and in_backward() and not is_replaying():
        layer.check_replay_unedited(q)  # a checkpoint of somebody's own is run again: unheard, and as it was
        return out
    if not layer.hook_point.is_active:
        return out
    return layer.apply_hook_point(q, k, v, make_params, out)


def in_backward() -> bool:
    """Whether gradients are being computed now: then a forward pass is one that a checkpoint repeats."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]


def _check_kwargs(
    layer: AttachedLayer,
    kwargs: dict[str, Any],
    function: Callable[..., Any],
    supported: Collection[str] = SUPPORTED_KWARGS,
) -> None:
    """Refuse an argument that decides about scores and is not heeded here; `function` is the one it is for."""
    for name, value in kwargs.items():
        if name in supported or value is None or value is False:
            continue
        if name not in UNSUPPORTED_KWARGS and layer.words is not None and name not in layer.words:
            continue
        reason = UNSUPPORTED_KWARGS.get(name, f"an argument {name!r} of {function.__name__} that is not known here")
        raise HeadwiseError(
            f"the call at {layer.info.name} carries {reason}; it was refused rather than computed wrongly."
        )


@cache
def _words(run: Callable[..., Any]) -> frozenset[str] | None:
    """The words in the source of a function; None if its source cannot be read."""
    try:
        return frozenset(re.findall(r"\w+", inspect.getsource(run)))
    except (OSError, TypeError):
        return None


def _uneven_kv_of_head(layer: AttachedLayer, query: Tensor, key: Tensor) -> tuple[int, ...] | None:
    """Which key each head reads, where cutting has left groups of different sizes, which transformers cannot share out."""
    kv_of_head = layer.spec.kv_of_head
    H, K = query.shape[1], key.shape[1]
    return kv_of_head if layer.has_uneven_groups and len(kv_of_head) == H and len(layer.spec.kv_head_ids) == K else None


@torch.no_grad()  # what is told saves nothing for a backward pass, so that a checkpoint may repeat a call unheard
def _score_params(
    layer: AttachedLayer, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> ScoreParams:
    """What decided the scores of this call."""
    (H, T, d), (K, S) = query.shape[1:], key.shape[1:3]
    kv_of_head = tuple(range(H)) if K == H else layer.spec.kv_of_head
    if len(kv_of_head) != H or len(layer.spec.head_ids) != H or (kv_of_head and max(kv_of_head) >= K):
        raise HeadwiseError(
            f"{layer.info.name} was called with {H} heads and {K} key/value heads; it should have "
            f"{len(layer.spec.head_ids)} and {len(layer.spec.kv_head_ids)}."
        )
    scale = kwargs.get("scaling")
    causal = kwargs.get("is_causal")
    causal = getattr(layer.module, "is_causal", True) if causal is None else causal
    bias: Tensor | None = kwargs.get("position_bias")
    if mask is None:
        # SDPA's own flag counts from the upper left.
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
        raise HeadwiseError(f"the position bias at {layer.info.name} is {tuple(bias.shape)}; expected four axes.")
    return ScoreParams(
        d**-0.5 if scale is None else float(scale), kv_of_head, score_mask, None if bias is None else DenseBias(bias)
    )
