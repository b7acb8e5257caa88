"""Cutting: a new model without some heads. Their slices are gone, and so are keys and values nobody reads any more.

A layer writes Σ_h z[h] W_O[h] + b_O. Cutting a head takes its term out of the sum. Folding leaves its mean behind: what
it gave on average over a corpus goes into the bias, b_O + mean(z[h]) W_O[h], and costs nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from headwise.attach import Attached
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.heads.head import Pattern
from headwise.heads.packed import is_held
from headwise.heads.projections import cut_packed
from headwise.look.worth.outputs import Means, chosen_sites
from headwise.model import AnyModel, Transformer
from headwise.spec import Address, AttentionSpec, ModelSpec, SiteAddress, select
from headwise.spec.cache import Treatments, cache_rules

M = TypeVar("M", bound=AnyModel)
Biases = Mapping[SiteAddress, Tensor]  # (D,) each


@torch.no_grad()
def cut(model: M, heads: Pattern, folded: Biases | None = None, cache: Treatments | None = None) -> M:
    """A smaller model without these heads, sharing no memory with this one, which stays as it is.

    `folded` is added to the output biases of layers, as `fold` makes it; a model that had no such biases gets them. `cache`
    says what key heads keep; None: what they kept.

    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> small = cut(model, "5.1,3.*")
    >>> len(small.spec.addresses), model.spec.parameters - small.spec.parameters  # four matrices of 384 × 64, seven times
    (29, 688128)
    """
    check_model(model)
    gone = heads_to_cut(model, heads)
    if isinstance(model, Attached):
        return model.without(gone, folded)  # pyright: ignore[reportReturnType]
    return _cut_ours(model, gone, folded, cache)  # pyright: ignore


def _cut_ours(
    model: Transformer, gone: tuple[Address, ...], folded: Biases | None, cache: Treatments | None
) -> Transformer:
    spec = model.spec if cache is None else replace(model.spec, cache=cache_rules(cache, model.spec.key_heads))
    spec = _smaller(spec, gone, bool(folded))
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


@torch.no_grad()
def fold(model: AnyModel, heads: Pattern, means: Means) -> dict[SiteAddress, Tensor]:
    """What these heads write on average, summed by layer, in float64: mean(z[h]) W_O[h], (D,) each."""
    if means.by != "global":
        raise HeadwiseError("a bias is the same at every position; take means by='global' to fold them.")
    made = {}
    for site, chosen in chosen_sites(model, heads):
        W_O = site.W_O[[site.index(head) for head in chosen]].double()  # (n, e, D)
        made[site.address] = torch.einsum("ne,ned->d", means.of(chosen).to(W_O), W_O)
    return made


def check_model(model: AnyModel) -> None:
    """Heads are cut from models that are ours, or attached."""
    if not isinstance(model, Transformer | Attached):
        raise HeadwiseError(
            f"heads are cut from a headwise Transformer or an attached model; got {type(model).__name__}. Use hw.load(…) or "
            f"hw.attach(model)."
        )


def heads_to_cut(model: AnyModel, heads: Pattern) -> tuple[Address, ...]:
    """The heads a pattern names; not all that there are."""
    gone = select(heads, model.spec.addresses)
    if gone and len(gone) == len(model.spec.addresses):
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


def built(spec: ModelSpec, state: dict[str, Tensor], like: Transformer) -> Transformer:
    """A model of these tensors, copied; all else is as it was in the one it came from."""
    storage = next((layer.read.storage for layer in like.attention_layers()), "qkv")
    small = Transformer(spec, storage=storage, device="meta")
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
    modes = {name: part.training for name, part in like.named_modules()}
    for name, part in small.named_modules():
        part.training = modes.get(name, like.training)
    return small
