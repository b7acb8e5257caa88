"""Cutting heads out of somebody else's model, in place: projections become smaller, and modules are told so.

Keys and values nobody reads any more go too. Where that leaves groups of different sizes, which transformers cannot share
out, our function does it while the model is attached. A layer without heads is replaced by one that writes its bias.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.discover import PRUNED_ATTRIBUTE, AttentionModuleInfo, is_conv1d, out_size
from headwise.attached.head_count_fields import TensorSlice, channel_selections, head_tensor_slices, set_head_counts
from headwise.attached.layer import AttachedLayer
from headwise.attached.pruned_head_hooks import (
    BIAS_TABLE,
    POSITION_BIAS,
    hook_bias_heads,
    hook_norm_channels,
    shares_position_bias,
)
from headwise.errors import HeadwiseError
from headwise.spec import Address, AttentionSpec, LayerAddress


@torch.no_grad()
def prune_layers(layers: list[AttachedLayer], pruned: Iterable[Address]) -> list[AttachedLayer]:
    """Take heads out of these layers; gives the layers there are now."""
    heads_by_layer = _heads_by_layer(pruned)
    pruned_by_layer = [heads_by_layer.get(layer.hook_point.address) for layer in layers]
    return [
        _prune_layer(layer, layer.pruned_spec(head_ids)) if head_ids else layer
        for layer, head_ids in zip(layers, pruned_by_layer, strict=True)
    ]


@torch.no_grad()
def add_to_output_biases(layers: Iterable[AttachedLayer], folded_biases: Mapping[LayerAddress, Tensor]) -> None:
    """Add to output biases, (D,) each."""
    for layer in layers:
        bias = folded_biases.get(layer.hook_point.address)
        if bias is not None:
            _add_bias(layer, bias)


def check_prunable(layers: Iterable[AttachedLayer], pruned: Iterable[Address]) -> None:
    """Refuse to cut what cannot be, before anything is touched."""
    heads_by_layer = _heads_by_layer(pruned)
    for layer in layers:
        head_ids = heads_by_layer.get(layer.hook_point.address)
        if head_ids and not isinstance(layer.info.module, HeadlessAttention):
            _check_layer(layer)
            if (
                hasattr(layer.info.module, BIAS_TABLE)
                and shares_position_bias(layer.info.module)
                and not layer.pruned_spec(head_ids).head_ids
            ):
                raise HeadwiseError(
                    f"{layer.info.name} makes the position bias of all layers of its stack, so not all of its heads can be "
                    f"cut; keep one, or silence them: attached.heads[…].silenced()."
                )


def _check_layer(layer: AttachedLayer) -> None:
    info, name = layer.info, type(layer.info.module).__name__
    hint = "silence them instead: attached.heads[…].silenced()."
    if layer.hook_point.is_active:
        raise HeadwiseError(
            f"somebody looks at {layer.hook_point.address} or silences its heads now; end that before cutting."
        )
    if info.output_module is None or layer.z_path not in ("plain", "gated"):
        raise HeadwiseError(f"heads of {name} cannot be cut: z is not seen to enter W_O as heads gave it; {hint}")
    all_indices = list(range(len(layer.spec.head_ids))), list(range(len(layer.spec.kv_head_ids)))
    try:
        modules = {tensor_slice.holder for tensor_slice in head_tensor_slices(layer, *all_indices)}
    except HeadwiseError as error:
        raise HeadwiseError(f"heads of {name} cannot be cut: {str(error).rstrip('.')}; {hint}") from None
    for module in modules:
        if hasattr(module, "in_features") and not _is_linear(module):
            raise HeadwiseError(f"{info.name} projects with {type(module).__name__}, which cannot be cut here; {hint}")


def _is_linear(module: nn.Module) -> bool:
    """Whether weights are rows and columns: torch's own, or a class of a model's own file, which the proof then tries."""
    module_class = type(module)
    return module_class is nn.Linear or (
        issubclass(module_class, nn.Linear) and module_class.__module__.startswith("transformers.models.")
    )


def _heads_by_layer(pruned: Iterable[Address]) -> dict[LayerAddress, set[int]]:
    heads_by_layer: dict[LayerAddress, set[int]] = {}
    for address in pruned:
        heads_by_layer.setdefault(address.layer_address, set()).add(address.head)
    return heads_by_layer


def _prune_layer(layer: AttachedLayer, pruned_spec: AttentionSpec) -> AttachedLayer:
    info, spec = layer.info, layer.spec
    heads = [spec.head_ids.index(head_id) for head_id in pruned_spec.head_ids]
    kv_heads = [spec.kv_head_ids.index(head_id) for head_id in pruned_spec.kv_head_ids]
    _slice_all(layer, heads, kv_heads)
    info = replace(info if pruned_spec.head_ids else _replace_with_headless(layer), kept_heads=pruned_spec.head_ids)
    return _rebuild_layer(layer, info)


@torch.no_grad()
def expand_kv_groups(layer: AttachedLayer) -> AttachedLayer:
    """Give every head a key and a value of its own, so that plain transformers can run a layer of uneven groups."""
    spec = layer.spec
    _slice_all(layer, list(range(len(spec.head_ids))), list(spec.kv_of_head))
    return _rebuild_layer(layer, replace(layer.info, kv_heads=layer.info.heads, kv_expanded=True))


def _slice_all(layer: AttachedLayer, heads: list[int], kv_heads: list[int]) -> None:
    for selection in channel_selections(layer, heads, kv_heads):
        (hook_bias_heads if selection.module is layer.info.module else hook_norm_channels)(
            selection.module, selection.head_indices, selection.head_count
        )
    for tensor_slice in head_tensor_slices(layer, heads, kv_heads):
        slice_parameter(tensor_slice)


def _rebuild_layer(layer: AttachedLayer, info: AttentionModuleInfo) -> AttachedLayer:
    """The layer that a module is now."""
    info = replace(
        info, layouts=tuple(layer.layouts[projection] for projection in "qkv"), num_outputs=layer.num_outputs
    )
    info.module.__dict__[PRUNED_ATTRIBUTE] = info  # whoever attaches to it again finds its numbers
    rebuilt = AttachedLayer(info, layer.mask_converter)
    rebuilt.copy_probe_results(layer)
    for selection in channel_selections(layer, [], []):
        if selection.module is not layer.info.module:
            rebuilt.withheld_reasons |= dict.fromkeys("qk", "a norm over all heads goes on to see those that were cut")
    if rebuilt.spec.head_ids:
        set_head_counts(rebuilt, (len(layer.spec.head_ids), len(layer.spec.kv_head_ids)))
    return rebuilt


class HeadlessAttention(nn.Module):
    """An attention layer without heads: it writes its bias, and tells a cache how many tokens have passed."""

    def __init__(
        self, output_name: str | None, output_module: nn.Module, layer_idx: int | None, num_outputs: int, config: Any
    ) -> None:
        super().__init__()
        self.layer_idx, self._output_name, self._num_outputs = layer_idx, output_name, num_outputs
        self.config: Any = config  # which attention runs is asked of it
        if output_name is not None:  # what writes was inside, and keeps its name there
            self.add_module(output_name, output_module)

    def forward(self, hidden_states: Tensor, *args: Any, key_value_states: Any = None, **kwargs: Any) -> Any:
        """(B, T, D) → (B, T, D), or (B, T, 0) where what writes comes behind; and nothing besides, as often as was given.

        A position bias is handed on.
        """
        from transformers import Cache

        cache: Any = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
        if cache is not None and key_value_states is None:
            cache = getattr(cache, "self_attention_cache", cache)
            empty_kv = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)  # (B, 1, T, 1)
            cache.update(empty_kv, empty_kv, self.layer_idx)
        if self._output_name is None:
            out = hidden_states[..., :0]
        else:
            output_module: Any = getattr(self, self._output_name)
            out = hidden_states.new_zeros(*hidden_states.shape[:-1], out_size(output_module))
            out = out if output_module.bias is None else out + output_module.bias
        extra_outputs = [kwargs.get(POSITION_BIAS), *(None,) * (self._num_outputs - 2)] if self._num_outputs > 1 else []
        return (out, *extra_outputs) if self._num_outputs else out


def _replace_with_headless(layer: AttachedLayer) -> AttentionModuleInfo:
    """Put a layer without heads in a module's place."""
    info = layer.info
    assert info.output_module is not None
    child_names = {id(child): name for name, child in info.module.named_children()}
    layer_idx, layer_id, config = (getattr(info.module, name, None) for name in ("layer_idx", "layer_id", "config"))
    layer_idx = layer_id if layer_idx is None else layer_idx
    headless = HeadlessAttention(
        child_names.get(id(info.output_module)), info.output_module, layer_idx, layer.num_outputs, config
    )
    setattr(info.parent, info.name.rpartition(".")[2], headless.train(info.module.training))
    return replace(info, module=headless, qkv_modules=None)


def slice_parameter(tensor_slice: TensorSlice) -> None:
    """Leave of a tensor what stays, and tell its module how large it is."""
    holder, value = tensor_slice.holder, getattr(tensor_slice.holder, tensor_slice.name)
    index = torch.tensor(tensor_slice.indices, dtype=torch.long, device=value.device)
    setattr(holder, tensor_slice.name, _make_parameter_like(value, value.index_select(tensor_slice.axis, index)))
    if tensor_slice.name != "weight" or value.ndim != 2:
        return
    names = ("nx", "nf") if is_conv1d(holder) else ("out_features", "in_features")
    if hasattr(holder, names[tensor_slice.axis]):
        setattr(holder, names[tensor_slice.axis], len(tensor_slice.indices))


def _make_parameter_like(reference: Any, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach().contiguous().clone(), requires_grad=reference.requires_grad)


def _add_bias(layer: AttachedLayer, shift: Tensor) -> None:
    """Add to a layer's output bias, in float64; where there was none it begins at 0."""
    output_module: Any = layer.info.output_module
    old_bias = output_module.weight.new_zeros(len(shift)) if output_module.bias is None else output_module.bias.detach()
    output_module.bias = _make_parameter_like(
        output_module.weight, (old_bias.double() + shift.to(old_bias.device).double()).to(old_bias.dtype)
    )
