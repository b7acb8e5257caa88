"""The function that transformers calls for every attention: the same SDPA as before, and then the site.

It stands under SDPA's own name while any model is attached, so that no configuration is touched: models that ask for the name
find it, and `set_attn_implementation("sdpa")` changes nothing. Where nobody looks, it adds one look into a dictionary. Where
somebody does, what the call was made of is told as `Terms`; whatever it carries that SDPA would drop is refused, so that no
number is ever wrong.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from headwise.attach.layer import Layer
from headwise.attach.masks import lowest
from headwise.errors import HeadwiseError
from headwise.heads.site import is_repeated
from headwise.kernels.bias import Given
from headwise.kernels.masks import Causal, Mask
from headwise.kernels.terms import Terms, spread

NAME = "sdpa"
# The layer that looks at a module: beside the module, so that copies of it, and what is saved of it, know nothing of it.
MARKED: "WeakKeyDictionary[nn.Module, Layer]" = WeakKeyDictionary()
_handles: "WeakSet[Any]" = WeakSet()  # whoever is attached now
# What may come with a call: SDPA heeds it, or it changes nothing about which key is weighed how.
HEEDED = {"dropout", "scaling", "is_causal", "position_bias"}
HARMLESS = {
    *("sliding_window", "position_ids", "cache_position", "use_cache", "position_embeddings", "deterministic"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "seq_idx", "num_items_in_batch"),
    *("input_ids", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
}
REFUSED = {
    "s_aux": "learned sinks",
    "softcap": "capped scores",
    "output_attentions": "maps, which the fused path never makes; use hw.attend or hw.record",
    "head_mask": "a mask of heads; use theirs.heads[…].silenced() or .scaled(…)",
    "cache": "a paged cache",
}


def register(handle: Any) -> None:
    """Put our function in SDPA's place, for as long as this handle or another is attached."""
    from transformers import AttentionInterface

    _handles.add(handle)
    AttentionInterface.register(NAME, attend)


def unregister(handle: Any) -> None:
    """Leave the place, if nobody is attached any more."""
    from transformers import AttentionInterface

    _handles.discard(handle)
    if not _handles:
        AttentionInterface.register(NAME, _sdpa())


def is_replaced() -> bool:
    """Whether somebody else has put a function in SDPA's place."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[NAME] not in (attend, _sdpa())


def _sdpa() -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """(B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, T, H, e), and no maps."""
    layer = MARKED.get(module)
    if layer is None:  # a model that is not attached
        return _sdpa()(module, query, key, value, attention_mask, **kwargs)
    _refuse(layer, kwargs)
    own = _own_keys(layer, query, key)
    keys, values = (key, value) if own is None else (spread(key, own), spread(value, own))
    out, maps = _sdpa()(module, query, keys, values, attention_mask, **kwargs)  # (B, T, H, e)
    if layer.trial is not None:
        return layer.trial.attention(
            query, key, value, out, lambda: _terms(layer, query, key, attention_mask, kwargs)
        ), maps
    if in_backward() and not is_repeated():
        layer.check_repeated(query)  # a checkpoint of somebody's own is run again: unheard, and as it was
        return out, maps
    if not layer.site.is_open:
        return out, maps
    terms = _terms(layer, query, key, attention_mask, kwargs)
    return layer.passing(query, key, value, terms, out), maps


def in_backward() -> bool:
    """Whether gradients are being computed now: then a forward pass is one that a checkpoint repeats."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]


def _refuse(layer: Layer, kwargs: dict[str, Any]) -> None:
    for name, given in kwargs.items():
        if name in HEEDED or name in HARMLESS or given is None or given is False:
            continue
        what = REFUSED.get(name, f"an argument {name!r} that plain scaled-dot-product attention does not know")
        raise HeadwiseError(
            f"the call at {layer.found.name} carries {what}; it was refused rather than computed wrongly."
        )


def _own_keys(layer: Layer, query: Tensor, key: Tensor) -> tuple[int, ...] | None:
    """Which key each head reads, where cutting has left groups of different sizes, which transformers cannot share out."""
    groups = layer.spec.kv_of_head
    H, K = query.shape[1], key.shape[1]
    return groups if layer.uneven and len(groups) == H and len(layer.spec.kv_ids) == K else None


@torch.no_grad()  # what is told saves nothing for a backward pass, so that a checkpoint may repeat a call unheard
def _terms(layer: Layer, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Terms:
    """What decided the scores of this call."""
    (H, T, d), (K, S) = query.shape[1:], key.shape[1:3]
    groups = tuple(range(H)) if K == H else layer.spec.kv_of_head
    if len(groups) != H or len(layer.spec.head_ids) != H or (groups and max(groups) >= K):
        raise HeadwiseError(
            f"{layer.found.name} was called with {H} heads and {K} key/value heads; it should have "
            f"{len(layer.spec.head_ids)} and {len(layer.spec.kv_ids)}."
        )
    scale = kwargs.get("scaling")
    causal = kwargs.get("is_causal")
    causal = getattr(layer.module, "is_causal", True) if causal is None else causal
    bias: Tensor | None = kwargs.get("position_bias")
    if mask is None:
        told: Mask | None = Causal(0) if causal and T > 1 else None  # SDPA's own flag counts from the upper left
    elif mask.dtype == torch.bool:
        told = layer.masks.of(mask, T, S)
    else:
        told = layer.masks.of(mask, T, S)
        more = mask.masked_fill(mask <= lowest(mask) / 2, 0)
        bias = (more if bias is None else bias + more) if bool(more.any()) or bias is not None else None
    if bias is not None and bias.ndim != 4:
        raise HeadwiseError(f"the position bias at {layer.found.name} is {tuple(bias.shape)}; expected four axes.")
    return Terms(d**-0.5 if scale is None else float(scale), groups, told, None if bias is None else Given(bias))
