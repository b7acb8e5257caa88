"""A model of ours without some heads: their slices are gone, and so are keys and values nobody reads any more."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.heads.head import Pattern
from headwise.heads.projections import cut_packed
from headwise.heads.quantized_weights import is_held
from headwise.spec import Address, AttentionSpec, ModelSpec, SiteAddress, select
from headwise.spec.cache_policy import Treatments, cache_rules

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer

Biases = Mapping[SiteAddress, Tensor]  # (D,) each


@torch.no_grad()
def without(
    model: "Transformer", heads: Pattern, folded: Biases | None = None, cache: Treatments | None = None
) -> "Transformer":
    """A smaller model without these heads, sharing no memory with this one, which stays as it is.

    `folded` is added to the output biases of layers; a model that had none gets them. `cache` says what key heads keep;
    None: what they kept.
    """
    spec = model.spec if cache is None else replace(model.spec, cache=cache_rules(cache, model.spec.key_heads))
    spec = _smaller(spec, heads_to_cut(model.spec, heads), bool(folded))
    state = dict(model.state_dict())  # split, with a head axis
    for name, layer in model.named_modules():
        if isinstance(layer, MultiHeadAttention):
            after = spec.attention_at(layer.site.address)
            _cut_layer(state, f"{name}.", layer.spec, after)
            cut_packed(state, f"{name}.", layer, after)
            if spec.attention.out_bias:
                none = model.embed.like.new_zeros(spec.width)  # (D,)
                _add(state, f"{name}.write.", none, (folded or {}).get(layer.site.address))
    return built(spec, state, model)


def heads_to_cut(spec: ModelSpec, heads: Pattern) -> tuple[Address, ...]:
    """The heads a pattern names; not all that there are."""
    gone = select(heads, spec.addresses)
    if gone and len(gone) == len(spec.addresses):
        raise HeadwiseError(f"that would cut all {len(gone)} heads of the model; keep at least one.")
    return gone


def _smaller(spec: ModelSpec, gone: tuple[Address, ...], folded: bool) -> ModelSpec:
    spec = spec.without(gone)
    return replace(spec, attention=replace(spec.attention, out_bias=True)) if folded else spec


def _cut_layer(state: dict[str, Tensor], prefix: str, before: AttentionSpec, after: AttentionSpec) -> None:
    """Keep the slices of the heads that stay; W_O has its heads on the second axis, all others on the first."""
    heads = [before.head_ids.index(number) for number in after.head_ids]
    keys = [before.kv_ids.index(number) for number in after.kv_ids]
    by_head = dict.fromkeys(("read.q", "write.weight", "sink", "gate", "position"), heads)
    rows = by_head | {"read.k": keys, "read.v": keys}
    for part, chosen in rows.items():
        for name in [name for name in state if name.startswith(prefix + part) and not is_held(name)]:
            index = torch.tensor(chosen, dtype=torch.long, device=state[name].device)
            state[name] = state[name].index_select(1 if part == "write.weight" else 0, index)


def _add(state: dict[str, Tensor], prefix: str, none: Tensor, more: Tensor | None) -> None:
    """Add to a layer's output bias, in float64; where there was none it begins at 0."""
    bias = state.get(f"{prefix}bias", none)
    state[f"{prefix}bias"] = bias if more is None else (bias.double() + more.to(bias.device).double()).to(bias.dtype)


def built(spec: ModelSpec, state: dict[str, Tensor], like: "Transformer") -> "Transformer":
    """A model of these tensors, copied; all else is as it was in the one it came from."""
    if like.is_shared:
        raise HeadwiseError("this process holds a part of the model; change the whole one, then use hw.shard.")
    storage = next((layer.read.storage for layer in like.attention_layers()), "qkv")
    small = type(like)(spec, storage=storage, device="meta")
    if spec.tied:
        state.pop("output.vocabulary.weight", None)
    own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    if spec.tied and small.output is not None and "embed.tokens.weight" in own:
        own["output.vocabulary.weight"] = own["embed.tokens.weight"]
    small.load_state_dict(own, assign=True)
    small.to(like.embed.like.dtype)
    for new, old in zip(small.attention_layers(), like.attention_layers(), strict=True):
        new.backend = old.backend
    small.tokenizer, small.family, small.checkpointing = like.tokenizer, like.family, like.checkpointing
    small.plans = like.plans
    modes = {name: part.training for name, part in like.named_modules()}
    for name, part in small.named_modules():
        part.training = modes.get(name, like.training)
    return small
