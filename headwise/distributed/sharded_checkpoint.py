"""Checkpoints that several processes write and read together: each writes and reads the parts that it holds.

The stored parts do not depend on the parallel strategy: weights of heads are stored by head, all others by their rows and
columns in the full tensor. So a run can resume with another number of processes. torch.distributed.checkpoint writes and
reads the files with its safetensors storage, because its default storage uses pickle.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headwise.distributed.distributed_checkpoint_reader import MODEL_PREFIX
from headwise.distributed.head_partition import HeadPartition
from headwise.distributed.model_partition import RankPartition, partition_model
from headwise.distributed.model_shard import ShardedTransformer
from headwise.distributed.parallel_strategies import local_offset, local_tensor
from headwise.distributed.process_group import ProcessGroup, call_collective
from headwise.distributed.shard_axes import LAYER_KEY
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.model.transformer import Transformer

LOSS_PREFIX = "loss."  # names of parameters that belong to the loss, not to the model
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class TensorShard:
    """The part of a tensor that this process holds.

    Attributes:
        tensor: A view of the weights, so that loading writes into them.
        offsets: First entry of the part along each axis of the full tensor.
        shape: Shape of the full tensor.
        is_written: False if another process holds the same part and writes it.
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    is_written: bool = True

    # The methods below are those that torch.distributed.checkpoint calls on a tensor that is stored in parts.

    def size(self) -> torch.Size:
        """Return the size of the full tensor."""
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.tensor), self.size())
        return [WriteItem(MetadataIndex(name, self.offsets), WriteItemType.SHARD, tensor_data=data)] * self.is_written

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.size())


class _ShardSavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


class _ShardLoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = (
            state_dict  # unchanged: the default planner drops entries that are not tensors
        )
        self.metadata, self.is_coordinator, self.mappings = metadata, is_coordinator, {}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def tensor_shards(model: Transformer, name: str, value: Tensor) -> Iterator[tuple[str, TensorShard]]:
    """Return a parameter of this process, or a moment of it, as named parts of the full model's tensors."""
    local_value, start = local_tensor(value).detach(), local_offset(value)
    if not local_value.numel():
        return
    partition = model.partition if isinstance(model, ShardedTransformer) else partition_model(model.spec, 1)[0]
    if name.startswith(LOSS_PREFIX):  # replicated
        zeros, full_shape = (0,) * local_value.ndim, tuple(local_value.shape)
        yield name, TensorShard(local_value, zeros, full_shape, is_written=partition.rank == 0)
        return
    match = LAYER_KEY.fullmatch(name)
    if match is not None and match[4] != "output_projection.bias":
        layer = model.get_submodule(name.removesuffix(f".{match[4]}"))
        assert isinstance(layer, MultiHeadAttention)
        yield from _per_head_shards(layer, name.removesuffix(match[4]), match[4], local_value, start)
        return
    first_offsets, full_shape = _offset_in_full(model, partition, name, value)
    offsets = (first_offsets[0] + start, *first_offsets[1:])
    is_replicated = full_shape == tuple(value.shape) and partition.rank > 0  # all processes that share heads have it
    yield name, TensorShard(local_value, offsets, full_shape, is_written=not is_replicated)


def _offset_in_full(
    model: Transformer, partition: RankPartition, name: str, value: Tensor
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first entry of a parameter along each axis of the full model's tensor, and the shape of that tensor."""
    spec, shape = model.spec, tuple(value.shape)
    if ".mlp.down." in name and len(shape) == 2:
        return (0, partition.mlp_range[0]), (shape[0], spec.mlp_width)
    if ".mlp.up." in name or ".mlp.gate." in name:
        return (partition.mlp_range[0], *[0] * (len(shape) - 1)), (spec.mlp_width, *shape[1:])
    if name.startswith(("embed.tokens.", "output.vocabulary.")):
        return (partition.vocab_range[0], *[0] * (len(shape) - 1)), (spec.vocab, *shape[1:])
    return (0,) * len(shape), shape


def _per_head_shards(
    layer: MultiHeadAttention, prefix: str, parameter: str, local_tensor: Tensor, start: int
) -> Iterator[tuple[str, TensorShard]]:
    """Return the weights of a layer, one part per head: each keeps the head axis, of length 1."""
    spec, partition = layer.spec, layer.partition
    assert partition is None or isinstance(partition, HeadPartition)
    if parameter == "output_projection.weight":  # (rows, H·e)
        for head_id, block in zip(spec.head_ids, local_tensor.split(spec.value_dim, 1), strict=True):
            full_shape = (spec.width, 1, spec.value_dim)
            yield f"{prefix}{parameter}/1/{head_id}", TensorShard(block.unsqueeze(1), (start, 0, 0), full_shape)
    elif not parameter.startswith("qkv."):  # one row per head
        for row, entry in enumerate(local_tensor.split(1)):
            yield (
                f"{prefix}{parameter}/0/{spec.head_ids[start + row]}",
                TensorShard(entry, (0,) * entry.ndim, tuple(entry.shape)),
            )
    else:
        projections, _, kind = parameter.removeprefix("qkv.").rpartition("_")
        row_start, end = 0, start + len(local_tensor)
        for projection in projections:
            channels = layer.qkv.sizes[projection][1]
            for index, head_id in enumerate(spec.head_ids if projection == "q" else spec.kv_head_ids):
                low, high = max(row_start, start), min(row_start + channels, end)
                if low < high:
                    rows = local_tensor[low - start : high - start].unsqueeze(0)  # (1, rows, D)
                    offsets = (0, low - row_start, *[0] * (rows.ndim - 2))
                    is_written = (
                        projection == "q"
                        or partition is None
                        or partition.is_first_holder(partition.own_kv_heads[index])
                    )
                    yield (
                        f"{prefix}qkv.{projection}.{kind}/0/{head_id}",
                        TensorShard(rows, offsets, (1, channels, *rows.shape[2:]), is_written),
                    )
                row_start += channels


def weight_shards(model: Transformer, parameters: Mapping[str, nn.Parameter]) -> dict[str, TensorShard]:
    """Return all weights of the model, frozen ones included, and the trainable parameters of the loss, by name."""
    shards: dict[str, TensorShard] = {}
    for name, value in model.named_parameters():
        shards |= {f"{MODEL_PREFIX}{shard_name}": shard for shard_name, shard in tensor_shards(model, name, value)}
    for name, value in parameters.items():
        if name.startswith(LOSS_PREFIX):
            shards |= {f"own:{name}": shard for _, shard in tensor_shards(model, name, value)}
    return shards


def moment_shards(
    model: Transformer, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, TensorShard]:
    """Return the moments that the optimizer keeps of each parameter, by name."""
    shards: dict[str, TensorShard] = {}
    for name, value in parameters.items():
        state = optimizer.state.get(value, {})  # the number of steps is in training.json
        for moment in (moment for moment in MOMENTS if moment in state):
            shards |= {
                f"{moment}:{shard_name}": shard for shard_name, shard in tensor_shards(model, name, state[moment])
            }
    return shards


def save_shards(shards: dict[str, TensorShard], folder: Path, process_group: ProcessGroup) -> None:
    """Write the parts of all processes into a folder."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    no_dist = process_group.size == 1
    _run_collective(lambda: save(shards, storage_writer=writer, planner=_ShardSavePlanner(), no_dist=no_dist))


@torch.no_grad()
def load_shards(shards: dict[str, TensorShard], folder: Path, process_group: ProcessGroup) -> None:
    """Read the parts of this process from a folder, into their tensors."""
    reader, planner = HuggingFaceStorageReader(str(folder)), _ShardLoadPlanner(flatten_state_dict=False)
    no_dist = process_group.size == 1
    _run_collective(lambda: load(shards, storage_reader=reader, planner=planner, no_dist=no_dist))  # pyright: ignore


def _run_collective(operation: Callable[[], object]) -> None:
    """Run an operation of all processes. If it fails in one of them, raise a HeadwiseError in all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected in a single process
            call_collective(operation)
    except CheckpointException as error:
        first_failure = next(iter(error.failures.values()))[0]
        raise HeadwiseError(
            f"checkpoint: it cannot be written or read ({first_failure}). Earlier checkpoints are not affected. "
            "Check disk space and permissions, then run again."
        ) from None
