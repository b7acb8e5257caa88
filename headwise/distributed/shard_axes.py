"""The axis along which each tensor of a model is split, and the entries that each process holds.

Slicing and gathering use one table. Names are those of the full model's state dict, with a head axis: q, k and v
(heads, channels, D), W_O (D, heads, e).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.distributed.model_partition import RankPartition
from headwise.distributed.process_group import ProcessGroupOps
from headwise.errors import UnsupportedModelError
from headwise.heads.projections import bits_of_present_heads
from headwise.spec import AttentionSpec, LayerAddress, ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION

LAYER_KEY = re.compile(r"(encoder_blocks|blocks)\.(\d+)\.(attention|cross)\.(.+)")
QUANTIZED_KEY = re.compile(r"(codes|scales|rows)(\d+)")


@dataclass(frozen=True)
class AxisPartition:
    """One axis of a tensor, and the positions of the entries that each process holds."""

    dim: int
    indices: tuple[Sequence[int], ...]

    def slice_for(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the entries of one process: a view, if they are contiguous."""
        own_indices = self.indices[rank]
        if isinstance(own_indices, range) or list(own_indices) == list(
            range(own_indices[0], own_indices[-1] + 1) if own_indices else ()
        ):
            return tensor.narrow(self.dim, own_indices[0] if own_indices else 0, len(own_indices))
        return tensor.index_select(self.dim, torch.tensor(own_indices, dtype=torch.long, device=tensor.device))

    def gather(self, piece: Tensor, collectives: ProcessGroupOps) -> Tensor:
        """Gather the full tensor from the pieces of all processes. Replicated entries come from the lowest rank."""
        pieces = collectives.all_gather(piece, self.dim, [len(entries) for entries in self.indices])
        shape = list(piece.shape)
        shape[self.dim] = len({index for entries in self.indices for index in entries})
        full = piece.new_zeros(shape)
        for piece_indices, entries in reversed(list(zip(self.indices, pieces, strict=True))):
            full.index_copy_(
                self.dim, torch.tensor(list(piece_indices), dtype=torch.long, device=piece.device), entries
            )
        return full


def shard_axis_of(name: str, spec: ModelSpec, partitions: Sequence[RankPartition]) -> AxisPartition | None:
    """Return the axis along which a tensor of the full model is split; None if it is replicated."""
    match = LAYER_KEY.fullmatch(name)
    if match is not None:
        stack, layer, kind, rest = match.groups()
        layer_address = layer_address_at(spec, stack, int(layer), kind)
        return _attention_axis(
            rest,
            spec.attention_at(layer_address),
            [partition.heads_by_layer[str(layer_address)] for partition in partitions],
        )
    if (part_match := re.fullmatch(r".*\.mlp\.(up|gate|down)\.(.+)", name)) is not None:
        return _mlp_axis(part_match[1], part_match[2], spec, [range(*partition.mlp_range) for partition in partitions])
    if (part_match := re.fullmatch(r"(embed\.tokens|output\.vocabulary)\.(.+)", name)) is not None:
        return AxisPartition(
            1 if QUANTIZED_KEY.fullmatch(part_match[2]) else 0,
            tuple(range(*partition.vocab_range) for partition in partitions),
        )
    return None


def layer_address_at(spec: ModelSpec, stack: str, layer: int, kind: str) -> LayerAddress:
    """Return the address of a layer from its position among the modules."""
    if spec.kind != "encoder-decoder":
        return LayerAddress("", layer)
    return LayerAddress("enc" if stack == "encoder_blocks" else "dec" if kind == "attention" else "cross", layer)


def _attention_axis(rest: str, full_layer: AttentionSpec, heads_by_rank: list[tuple[int, ...]]) -> AxisPartition | None:
    head_indices = tuple([full_layer.head_ids.index(number) for number in ids] for ids in heads_by_rank)
    kv_ids_by_rank = [full_layer.keep_heads(ids).kv_head_ids for ids in heads_by_rank]
    kv_indices = tuple([full_layer.kv_head_ids.index(number) for number in ids] for ids in kv_ids_by_rank)
    if rest == "output_projection.bias":
        return None
    if rest == "output_projection.weight":
        return AxisPartition(1, head_indices)
    if (norm_match := re.fullmatch(r"([qk])_norm\.(weight|bias)", rest)) is not None:
        if full_layer.qk_norm is None or full_layer.qk_norm.weights != "per_head":
            return None
        return AxisPartition(0, head_indices if norm_match[1] == "q" else kv_indices)
    projection = (
        "o"
        if rest.startswith("output_projection.")
        else rest.removeprefix("qkv.")[0]
        if rest.startswith("qkv.")
        else "q"
    )
    indices = kv_indices if projection in "kv" else head_indices
    quantized_match = QUANTIZED_KEY.fullmatch(rest.rsplit(".", 1)[-1])
    if quantized_match is None:
        return AxisPartition(0, indices)
    same_bits = [
        matrix
        for matrix, bits in enumerate(bits_of_present_heads(full_layer, projection))
        if bits == int(quantized_match[2])
    ]
    return AxisPartition(0, tuple([same_bits.index(index) for index in ids if index in same_bits] for ids in indices))


def _mlp_axis(part: str, rest: str, spec: ModelSpec, channels_by_rank: list[range]) -> AxisPartition | None:
    quantized_match = QUANTIZED_KEY.fullmatch(rest)
    if part != "down":
        return AxisPartition(1 if quantized_match else 0, tuple(channels_by_rank))
    if rest == "bias":
        return None
    if quantized_match is None:
        return AxisPartition(1, tuple(channels_by_rank))
    bits, group_size = spec.bits_and_group_size("mlp")
    group_size = min(group_size, spec.mlp_width)
    ranges = [(-(-channels.start // group_size), -(-channels.stop // group_size)) for channels in channels_by_rank]
    if quantized_match[1] == "rows":
        ranges = [(channels.start, channels.stop) for channels in channels_by_rank]
    elif quantized_match[1] == "codes":
        ranges = [(channels.start * bits // 8, -(-channels.stop * bits // 8)) for channels in channels_by_rank]
    return AxisPartition(2, tuple(range(*channels) for channels in ranges))


def named_slices_for_rank(
    name: str, tensor: Tensor, spec: ModelSpec, partitions: Sequence[RankPartition], rank: int
) -> dict[str, Tensor]:
    """Return the parts of a tensor that one process holds, by name: views where possible, no entry if it holds none.

    The name is that of a state dict, or that of a parameter: q, k and v fused, W_O without head axis.
    """
    slices: dict[str, Tensor] = {}
    for split, piece in _split_fused_qkv(name, tensor, spec):
        axis = shard_axis_of(split, spec, partitions)
        own_slice = piece if axis is None else axis.slice_for(piece, rank)
        quantized_match = QUANTIZED_KEY.fullmatch(split.rsplit(".", 1)[-1])
        if quantized_match is None or own_slice.shape[0]:
            slices[split] = own_slice
    return slices


def _split_fused_qkv(name: str, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    match = LAYER_KEY.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    stack, number, kind, rest = match.groups()
    layer = spec.attention_at(layer_address_at(spec, stack, int(number), kind))
    fused = re.fullmatch(r"qkv\.(qkv|kv|q|k|v)_(weight|bias)", rest)
    if rest == "output_projection.weight" and tensor.ndim == 2:
        yield name, tensor.unflatten(1, (len(layer.head_ids), layer.value_dim))
    elif fused is None:
        yield name, tensor
    else:
        sizes = {
            "q": (len(layer.head_ids), layer.head_dim),
            "k": (len(layer.kv_head_ids), layer.head_dim),
            "v": (len(layer.kv_head_ids), layer.value_dim),
        }
        pieces = tensor.split([sizes[projection][0] * sizes[projection][1] for projection in fused[1]])
        for projection, piece in zip(fused[1], pieces, strict=True):
            before = name.removesuffix(rest)
            yield f"{before}qkv.{projection}.{fused[2]}", piece.unflatten(0, sizes[projection])


def rename_unquantized_to_plain_weight(state: dict[str, Tensor], local_spec: ModelSpec) -> dict[str, Tensor]:
    """Rename projections without quantized heads in this process to plain weights, as the smaller model has them."""
    renamed = dict(state)
    for name in state:
        match = LAYER_KEY.fullmatch(name)
        if match is None or not match[4].endswith(".rows32"):
            continue
        layer = local_spec.attention_at(layer_address_at(local_spec, match[1], int(match[2]), match[3]))
        projection = "o" if match[4].startswith("output_projection.") else match[4].removeprefix("qkv.")[0]
        if all(bits == FULL_PRECISION for bits in bits_of_present_heads(layer, projection)):
            weight_name = name.replace(".quantized.rows32", ".weight").replace(".rows32", ".weight")
            rows = renamed.pop(name)
            renamed[weight_name] = rows.transpose(0, 1) if projection == "o" else rows
    return renamed


def check_not_quantized(spec: ModelSpec, operation: str) -> None:
    """Raise if the weights are quantized."""
    if spec.weight_rules:
        raise UnsupportedModelError(
            f"model: quantized weights of a sharded model cannot be {operation}. Use the full model, or hw.dequantize(model)."
        )
