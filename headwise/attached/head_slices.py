"""Parts of an attention module that belong to single heads: tensor slices, head counts, and hooks for shared parts.

Parts are found by tables of names, without knowledge of architectures: an attribute is changed if it has a listed name and
the expected value. Some parts of a pruned layer still see all heads. A norm over all heads keeps its full width, and a hook
selects the channels of the remaining heads. A position bias that one layer computes and passes on stays complete, and a hook
gives each layer the slice of its own heads. Copies of a model and pickled models keep these hooks.

The tables may be incomplete. `prune_in_place.py` therefore tests a pruned model and restores it if its outputs differ from
those of the model with the same heads silenced.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attached.discover import is_conv1d, out_size
from headwise.attached.layer import AttachedLayer
from headwise.errors import UnsupportedModelError

POSITION_BIAS, BIAS_TABLE = "position_bias", "relative_attention_bias"
HEAD_COUNT_NAMES = (
    *("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "num_q_heads", "heads", "attention_heads"),
    "num_local_heads",
)
KV_COUNT_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "num_local_key_value_heads")
CHANNEL_COUNT_NAMES = (
    *(
        "all_head_size",
        "inner_dim",
        "embed_dim",
        "split_size",
        "dim",
        "hidden_size",
        "attention_dim",
        "q_dim",
        "q_size",
    ),
    *("num_heads_dim", "attention_hidden_size", "d_attn", "attn_dim"),
)
KV_CHANNEL_COUNT_NAMES = ("kv_dim", "kv_size", "kv_hidden_size")
GROUP_SIZE_NAMES = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
# Modules other than q, k, v with rows per head: gates, and up-projections of low-rank q, k and v.
PER_HEAD_MODULES = (
    *("q_proj", "q_gate_proj", "q_b_proj", "kv_b_proj", "k_b_proj", "v_b_proj", "q_up_proj", "kv_up_proj", "gate_proj"),
    *("g_proj", "gate", "attn_gate", "gate_layer", "g_b_proj", "o_gate", "output_gate", "to_gate_logits", "linear_pos"),
    *("relative_k_proj", "r_proj", "pos_key_proj", "pos_query_proj"),
)
# Parameters with one row per head.
PER_HEAD_PARAMETERS = ("bias_u", "bias_v", "pos_bias_u", "pos_bias_v", "gate_bias", "sinks")
# Norms, and whether they apply to KV heads.
PER_HEAD_NORMS = {"q_norm": False, "k_norm": True, "q_layernorm": False, "k_layernorm": True, "v_norm": True}


@dataclass(frozen=True)
class KeptTensorSlice:
    """Indices along one axis of a tensor that belong to the remaining heads.

    Attributes:
        holder: Module with the tensor.
        name: Attribute name of the tensor.
        axis: Axis to slice.
        indices: Indices to keep.
    """

    holder: nn.Module
    name: str
    axis: int
    indices: list[int]


@dataclass(frozen=True)
class ActivationHeadSelection:
    """Module whose activations contain all heads, of which some are selected.

    Attributes:
        module: The module.
        head_indices: Heads to select.
        head_count: Number of heads in the activations.
    """

    module: nn.Module
    head_indices: list[int]
    head_count: int


def activation_head_selections(
    layer: AttachedLayer, heads: list[int], kv_heads: list[int]
) -> list[ActivationHeadSelection]:
    """Return the modules of a layer that still see pruned heads: norms over all heads, and a shared position bias."""
    module, H, K = layer.info.module, len(layer.spec.head_ids), len(layer.spec.kv_head_ids)
    selections = [
        ActivationHeadSelection(norm, kv_heads if is_kv else heads, K if is_kv else H)
        for norm, is_kv in _all_head_norms(layer)
    ]
    return [*selections, ActivationHeadSelection(module, heads, H)] if shares_position_bias(module) else selections


def _all_head_norms(layer: AttachedLayer) -> Iterator[tuple[nn.Module, bool]]:
    """Yield norms over the projections of all heads, and whether they apply to KV heads."""
    for index, name in enumerate(("q_norm", "k_norm")):
        norm = getattr(layer.info.module, name, None)
        weight = getattr(norm, "weight", None)
        if layer.info.qkv_modules is None or len(layer.info.qkv_modules[1]) != 3 or norm is None or weight is None:
            continue
        if weight.ndim == 1 and len(weight) == out_size(layer.info.qkv_module(index)) != layer.spec.head_dim:
            yield norm, index == 1


def head_tensor_slices(layer: AttachedLayer, heads: list[int], kv_heads: list[int]) -> list[KeptTensorSlice]:
    """Return the slices of the tensors of a layer that belong to these heads and KV heads, given by index."""
    info, H, K = layer.info, len(layer.spec.head_ids), len(layer.spec.kv_head_ids)
    normed_projections = "".join("k" if is_kv else "q" for _, is_kv in _all_head_norms(layer))
    if info.output_module is None:
        raise UnsupportedModelError(f"the output projection W_O of {info.name} was not found.")
    tensor_slices = _column_slices(info.output_module, _block_indices(_axis_size(info.output_module, 1), H, heads))
    counts = {"q": (H, heads), "k": (K, kv_heads), "v": (K, kv_heads)}
    names = () if info.qkv_modules is None else info.qkv_modules[1]
    if len(names) == 3:
        for projection, name in zip("qkv", names, strict=True):
            if projection in normed_projections:
                continue
            submodule = getattr(info.module, name)
            tensor_slices += _row_slices(
                submodule, _projection_rows(layer, projection, out_size(submodule), *counts[projection])
            )
    elif names:
        tensor_slices += _row_slices(info.qkv_module(0), _fused_rows(layer, counts))
    for name in PER_HEAD_MODULES:
        submodule = getattr(info.module, name, None)
        if isinstance(submodule, nn.Linear) and name not in names and submodule is not info.output_module:
            tensor_slices += (
                _row_slices(submodule, _block_indices(out_size(submodule), H, heads))
                if out_size(submodule) % H == 0
                else []
            )
    for name, is_kv in PER_HEAD_NORMS.items():
        count, indices = (K, kv_heads) if is_kv else (H, heads)
        norm = getattr(info.module, name, None)
        for parameter_name in ("weight", "bias"):
            weight = getattr(norm, parameter_name, None)
            if isinstance(weight, Tensor) and weight.ndim == 2 and len(weight) == count:
                tensor_slices.append(KeptTensorSlice(getattr(info.module, name), parameter_name, 0, indices))
    for name in PER_HEAD_PARAMETERS:
        if isinstance(weight := getattr(info.module, name, None), nn.Parameter) and len(weight) == H:
            tensor_slices.append(KeptTensorSlice(info.module, name, 0, heads))
    table = getattr(info.module, BIAS_TABLE, None)
    if isinstance(table, nn.Embedding) and table.embedding_dim == H and not shares_position_bias(info.module):
        tensor_slices.append(KeptTensorSlice(table, "weight", 1, heads))
    return tensor_slices


def _projection_rows(layer: AttachedLayer, projection: str, rows: int, count: int, indices: list[int]) -> list[int]:
    """Return the rows of these heads in a separate q, k or v projection."""
    own_rows = count * (layer.spec.value_dim if projection == "v" else layer.spec.head_dim)
    if layer.layouts[projection] != "padded_at_end" or rows == own_rows:
        return _block_indices(rows, count, indices)
    extra_rows = (
        range(own_rows, rows)
        if (rows - own_rows) % count
        else [own_rows + row for row in _block_indices(rows - own_rows, count, indices)]
    )
    return [*_block_indices(own_rows, count, indices), *extra_rows]


def _fused_rows(layer: AttachedLayer, counts: dict[str, tuple[int, list[int]]]) -> list[int]:
    """Return the rows of these heads in a projection of q, k and v."""
    layouts, (H, heads) = set(layer.layouts.values()), counts["q"]
    rows = out_size(layer.info.qkv_module(0))
    if layouts == {"per_head"}:
        return _block_indices(rows, H, heads)
    sizes = {projection: layer.spec.value_dim if projection == "v" else layer.spec.head_dim for projection in "qkv"}
    row_indices, start = [], 0
    for projection, (count, indices) in counts.items():
        row_indices += [start + row for row in _block_indices(count * sizes[projection], count, indices)]
        start += count * sizes[projection]
    if layouts != {"fused"} or start != rows:
        raise UnsupportedModelError(
            f"it is unknown which rows of the projection in {layer.info.name} belong to which head, so its heads cannot be "
            f"separated."
        )
    return row_indices


def _block_indices(size: int, count: int, selected: list[int]) -> list[int]:
    """Return the indices of the selected blocks, out of `count` blocks of equal size."""
    block_size, remainder = divmod(size, count)
    if remainder:
        raise UnsupportedModelError(
            f"a projection has {size} rows or columns, which cannot be divided evenly among {count} heads, so its heads "
            f"cannot be separated."
        )
    return [block * block_size + offset for block in selected for offset in range(block_size)]


def _row_slices(module: nn.Module, indices: list[int]) -> list[KeptTensorSlice]:
    row_slices = [KeptTensorSlice(module, "weight", 1 if is_conv1d(module) else 0, indices)]
    return row_slices + (
        [KeptTensorSlice(module, "bias", 0, indices)] if getattr(module, "bias", None) is not None else []
    )


def _column_slices(module: nn.Module, indices: list[int]) -> list[KeptTensorSlice]:
    return [KeptTensorSlice(module, "weight", 0 if is_conv1d(module) else 1, indices)]


def _axis_size(module: nn.Module, axis: int) -> int:
    weight: Any = module.weight
    return weight.shape[1 - axis if is_conv1d(module) else axis]


def set_head_counts(layer: AttachedLayer, old_counts: tuple[int, int]) -> None:
    """Update a module's head counts and KV head counts after pruning."""
    module, spec = layer.module, layer.spec
    new_counts = len(spec.head_ids), len(spec.kv_head_ids)
    for names, index, multiplier in (
        (HEAD_COUNT_NAMES, 0, 1),
        (KV_COUNT_NAMES, 1, 1),
        (CHANNEL_COUNT_NAMES, 0, spec.value_dim),
        (KV_CHANNEL_COUNT_NAMES, 1, spec.value_dim),
    ):
        for name in names:
            if type(module.__dict__.get(name)) is int and module.__dict__[name] == old_counts[index] * multiplier:
                setattr(module, name, new_counts[index] * multiplier)
    for name in GROUP_SIZE_NAMES:
        if name in module.__dict__:
            setattr(module, name, 1 if layer.has_uneven_groups else new_counts[0] // new_counts[1])
    config_counts = {
        name: new_counts[index]
        for names, index in ((HEAD_COUNT_NAMES, 0), (KV_COUNT_NAMES, 1))
        for name in names
        if name in _counts_read_from_config(type(module))
    }
    if config_counts:
        config: Any = module.config
        wrapped = config.wrapped if isinstance(config, HeadCountConfigProxy) else config
        module.config = HeadCountConfigProxy(wrapped, config_counts)  # pyright: ignore


@cache
def _counts_read_from_config(module_class: type[nn.Module]) -> frozenset[str]:
    """Return the names of head counts that a module's forward reads from its configuration."""
    try:
        source = inspect.getsource(module_class.forward)
    except (OSError, TypeError):
        return frozenset()
    return frozenset(name for name in (*HEAD_COUNT_NAMES, *KV_COUNT_NAMES) if f"self.config.{name}" in source)


class HeadCountConfigProxy:
    """Configuration of one layer: a live view of the model's configuration with different head counts."""

    def __init__(self, wrapped: Any, counts: dict[str, int]) -> None:
        self.__dict__.update(counts, wrapped=wrapped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)


# Hooks of modules whose heads were pruned.


class SelectChannelsHook:
    """Forward hook of a norm over all heads that selects the channels of the remaining heads."""

    def __init__(self, channels: list[int]) -> None:
        self.channels = channels

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Select channels: (…, all channels) → (…, channels)."""
        return output[..., torch.tensor(self.channels, device=output.device)]


class PositionBiasSliceHook:
    """Hooks of a module that shares its position bias: the module uses the slice of its heads and passes on the full bias."""

    def __init__(self, head_indices: list[int], head_count: int) -> None:
        self.head_indices, self.head_count = head_indices, head_count
        self._full_bias: Tensor | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Slice the bias that the module receives."""
        names = list(inspect.signature(module.forward).parameters)
        kwargs = dict(zip(names, args, strict=False)) | kwargs
        self._full_bias = kwargs.get(POSITION_BIAS)
        return None if self._full_bias is None else ((), kwargs | {POSITION_BIAS: self._slice(self._full_bias)})

    def after_table(self, module: nn.Module, inputs: Any, biases: Tensor) -> Tensor:
        """Slice the output of the module's own bias table, (T, S, heads)."""
        self._full_bias = biases.permute(2, 0, 1)[None]  # (1, heads, T, S)
        return biases[..., torch.tensor(self.head_indices, device=biases.device)]

    def restore_full_bias(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Replace the bias that the module passes on by the full one; zeros if it has no bias."""
        if not isinstance(output, tuple) or len(output) < 2 or not isinstance(own_bias := output[1], Tensor):
            self._full_bias = None
            return None  # the module passes on no bias
        full_bias, self._full_bias = (
            own_bias[:, :1].expand(-1, self.head_count, -1, -1) if self._full_bias is None else self._full_bias,
            None,
        )
        return (output[0], full_bias, *output[2:])

    def _slice(self, bias: Tensor) -> Tensor:
        return bias if bias.shape[1] == 1 else bias[:, torch.tensor(self.head_indices, device=bias.device)]


def is_prune_hook(hook: Any) -> bool:
    """Return whether a hook was added by pruning."""
    return isinstance(hook, SelectChannelsHook) or isinstance(getattr(hook, "__self__", None), PositionBiasSliceHook)


def shares_position_bias(module: nn.Module) -> bool:
    """Return whether a module receives or computes a position bias and passes it on."""
    return POSITION_BIAS in inspect.signature(module.forward).parameters


def hook_norm_channels(norm: nn.Module, head_indices: list[int], head_count: int) -> None:
    """Make a norm output only the channels of these heads, out of its current heads."""
    hooks = norm._forward_hooks
    key = next((key for key, hook in hooks.items() if isinstance(hook, SelectChannelsHook)), None)
    channels = list(range(norm.weight.shape[0])) if key is None else hooks[key].channels  # pyright: ignore
    head_channels = len(channels) // head_count
    selection_hook = SelectChannelsHook(
        [channels[head * head_channels + offset] for head in head_indices for offset in range(head_channels)]
    )
    if key is None:
        norm.register_forward_hook(selection_hook)
    else:
        hooks[key] = selection_hook


def register_bias_slice_hooks(module: nn.Module, head_indices: list[int], head_count: int) -> None:
    """Make a module use only the bias of these heads, out of its current heads."""
    previous = next((hook.__self__ for hook in module._forward_hooks.values() if is_prune_hook(hook)), None)  # pyright: ignore
    if isinstance(previous, PositionBiasSliceHook):
        slice_hook = PositionBiasSliceHook([previous.head_indices[head] for head in head_indices], previous.head_count)
    else:
        slice_hook = PositionBiasSliceHook(head_indices, head_count)
    table = getattr(module, BIAS_TABLE, None)
    for hooked_module in (module, *([] if table is None else [table])):
        for hooks in (hooked_module._forward_hooks, hooked_module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if is_prune_hook(hook)]:
                del hooks[key]
    module.register_forward_pre_hook(slice_hook.enter, with_kwargs=True)
    module.register_forward_hook(slice_hook.restore_full_bias)
    if table is not None:
        table.register_forward_hook(slice_hook.after_table)


def prune_hooks_of(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Return the pruning hooks of a module, by kind."""
    kinds = [name for name in module.__dict__ if name in ("_forward_hooks", "_forward_pre_hooks")]
    return {name: {key: hook for key, hook in module.__dict__[name].items() if is_prune_hook(hook)} for name in kinds}


def restore_prune_hooks(module: nn.Module, saved: dict[str, dict[int, Any]]) -> None:
    """Restore saved pruning hooks."""
    for name, hooks in saved.items():
        current = module.__dict__[name]
        for key in [key for key, hook in current.items() if is_prune_hook(hook)]:
            del current[key]
        current.update(hooks)
