"""Pruning of native models: removes the slices of heads, and KV heads that no remaining head uses."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads import MultiHeadAttention
from headwise.heads.head import HeadPattern
from headwise.heads.projections import prune_quantized_state
from headwise.heads.qk_norm import store_pruned_norm_rows
from headwise.heads.quantized_layers import is_quantized_key
from headwise.kernels.rounding_tolerance import to_float64
from headwise.spec import Address, AttentionSpec, LayerAddress, ModelSpec, select
from headwise.spec.cache_policy import CachePolicies, rules_from_policies

if TYPE_CHECKING:
    from headwise.model.transformer import Transformer

T = TypeVar("T", bound="Transformer")
Biases = Mapping[LayerAddress, Tensor]  # (D,) each


@torch.no_grad()
def prune(model: T, heads: HeadPattern, folded_biases: Biases | None = None, cache: CachePolicies | None = None) -> T:
    """Return a smaller model without these heads. The given model stays unchanged and shares no memory with it.

    Args:
        model: The model.
        heads: Heads to prune, by address or pattern.
        folded_biases: Added to the output biases of layers, (D,) each. Missing output biases are created.
        cache: Cache policies of the KV heads. None means those of the model.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> model = Transformer(preset("nano"))
    >>> small = model.prune("5.1,3.*")
    >>> model.spec.num_parameters - small.spec.num_parameters  # seven times four matrices of 384 × 64
    688128
    >>> len(small.spec.head_addresses)
    29
    """
    spec = (
        model.spec
        if cache is None
        else replace(model.spec, cache=rules_from_policies(cache, model.spec.cached_kv_head_addresses))
    )
    spec = _pruned_spec(spec, heads_to_prune(model.spec, heads), add_out_bias=bool(folded_biases))
    state = dict(model.state_dict())  # one tensor per projection, with a head axis
    for name, layer in model.named_modules():
        if isinstance(layer, MultiHeadAttention):
            pruned_layer = spec.attention_at(layer.hook_point.address)
            store_pruned_norm_rows(state, f"{name}.", layer, layer.spec, pruned_layer)
            _prune_layer(state, f"{name}.", layer.spec, pruned_layer)
            prune_quantized_state(state, f"{name}.", layer, pruned_layer)
            if spec.attention.out_bias:
                zero_bias = model.embed.reference_tensor.new_zeros(spec.width)  # (D,)
                _add_to_bias(
                    state, f"{name}.output_projection.", zero_bias, (folded_biases or {}).get(layer.hook_point.address)
                )
    return rebuild_like(spec, state, model)


def heads_to_prune(spec: ModelSpec, heads: HeadPattern) -> tuple[Address, ...]:
    """Return the heads that a pattern selects, in all layers if these share their weights. Raise if these are all heads."""
    pruned = spec.with_shared_copies(select(heads, spec.head_addresses))
    if pruned and len(pruned) == len(spec.head_addresses):
        raise ArgumentError(f"heads: this would prune all {len(pruned)} heads of the model. Keep at least one head.")
    return pruned


def _pruned_spec(spec: ModelSpec, pruned: tuple[Address, ...], *, add_out_bias: bool) -> ModelSpec:
    spec = spec.without(pruned)
    return replace(spec, attention=replace(spec.attention, out_bias=True)) if add_out_bias else spec


def _prune_layer(state: dict[str, Tensor], prefix: str, before: AttentionSpec, after: AttentionSpec) -> None:
    """Keep the slices of the remaining heads. W_O has heads on the second axis, all other tensors on the first."""
    head_indices = [before.head_ids.index(number) for number in after.head_ids]
    kv_indices = [before.kv_head_ids.index(number) for number in after.kv_head_ids]
    by_head = ["qkv.q.", "qkv.kv.", "output_projection.weight", "sink", "gate", "position_bias", "output_gate."]
    by_kv_head = ["qkv.k.", "qkv.v."]
    if before.qk_norm is not None and before.qk_norm.weights == "per_head":
        by_head += ["q_norm.weight", "q_norm.bias"]
        by_kv_head += ["k_norm.weight", "k_norm.bias"]
    indices_by_part = dict.fromkeys(by_head, head_indices) | dict.fromkeys(by_kv_head, kv_indices)
    for part, kept_indices in indices_by_part.items():
        for name in [name for name in state if name.startswith(prefix + part) and not is_quantized_key(name)]:
            index = torch.tensor(kept_indices, dtype=torch.long, device=state[name].device)
            state[name] = state[name].index_select(1 if part == "output_projection.weight" else 0, index)


def _add_to_bias(state: dict[str, Tensor], prefix: str, zero_bias: Tensor, shift: Tensor | None) -> None:
    """Add to the output bias of a layer in float64. A missing bias counts as 0."""
    bias = state.get(f"{prefix}bias", zero_bias)
    if shift is not None:
        wide = to_float64(bias)
        bias = (wide + shift.to(wide)).to(bias)
    state[f"{prefix}bias"] = bias


def rebuild_like(spec: ModelSpec, state: dict[str, Tensor], like: T) -> T:
    """Build a model from copies of these tensors, with tokenizer, plans, backends and modes of another model."""
    if like.is_sharded:
        raise UnsupportedModelError(
            "model: a sharded model cannot be changed, because this process holds only a part of it. Change the full model, "
            "then call hw.shard."
        )
    storage = next((layer.qkv.storage for layer in like.attention_layers()), "qkv")
    model = type(like)(spec, storage=storage, device="meta")
    if spec.tied:
        state.pop("output.vocabulary.weight", None)
    tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    if spec.tied and model.output is not None and "embed.tokens.weight" in tensors:
        tensors["output.vocabulary.weight"] = tensors["embed.tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    model.to(like.embed.reference_tensor.dtype)
    for new, old in zip(model.attention_layers(), like.attention_layers(), strict=True):
        new.backend = old.backend
    model.tokenizer, model.family, model.checkpointing = like.tokenizer, like.family, like.checkpointing
    model.plans, model.matmul_tuner = like.plans, copy.copy(like.matmul_tuner)
    modes = {name: module.training for name, module in like.named_modules()}
    for name, module in model.named_modules():
        module.training = modes.get(name, like.training)
    return model
