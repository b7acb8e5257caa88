"""The function that transformers calls for every attention: the same SDPA as before, and then the site.

Where nobody looks, it adds one look into a dictionary. Where somebody does, what the call was made of is told as `Terms`;
whatever it carries that SDPA would drop is refused, so that no number is ever wrong.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headwise.attach.layer import Layer
from headwise.attach.masks import lowest
from headwise.errors import HeadwiseError
from headwise.kernels.masks import Causal, Mask
from headwise.kernels.terms import Terms, spread

NAME = "headwise"
MARK = "_headwise_layer"  # where a module keeps the layer that looks at it
# What may come with a call: SDPA heeds it, or it changes nothing about which key is weighed how.
HEEDED = {"dropout", "scaling", "is_causal", "position_bias"}
HARMLESS = {
    *("sliding_window", "position_ids", "cache_position", "use_cache", "position_embeddings", "deterministic"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "seq_idx", "num_items_in_batch"),
    *("output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
}
REFUSED = {
    "s_aux": "learned sinks",
    "softcap": "capped scores",
    "output_attentions": "maps, which the fused path never makes; use hw.attend or hw.record",
    "head_mask": "a mask of heads; use theirs.heads[…].silenced() or .scaled(…)",
    "cache": "a paged cache",
}


def register() -> None:
    """Make our function known to transformers, with SDPA's masks; once is enough, and again does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """(B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, T, H, e), and no maps."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer: Layer | None = module.__dict__.get(MARK)
    if layer is None:  # another model that shares the configuration of one that is attached
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    _refuse(layer, kwargs)
    own = _own_keys(layer, query, key)
    keys, values = (key, value) if own is None else (spread(key, own), spread(value, own))
    out, maps = sdpa_attention_forward(module, query, keys, values, attention_mask, **kwargs)  # (B, T, H, e)
    if not layer.site.is_open:
        return out, maps
    z = out.transpose(1, 2)  # (B, H, T, e)
    terms = _terms(layer, query, key, attention_mask, kwargs)
    changed = layer.site.passing(query, key, value, terms, z)
    return (out if changed is z else changed.transpose(1, 2).contiguous()), maps


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
    return Terms(d**-0.5 if scale is None else float(scale), groups, told, bias)
