"""Checkpoints of a run whose processes each hold a part: every process writes and reads what it has.

What lies there does not depend on the layout: weights of heads are told by head, all others by the rows and columns they are
of the whole. So a run can go on with another number of processes. Files are written and read by
torch.distributed.checkpoint with its safetensors storage; its usual one would be pickled.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headwise.distributed.parallel_strategy import local_offset, local_tensor
from headwise.distributed.process_group import ProcessGroup
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.io.atomic_write import atomic_folder
from headwise.io.sharded_reader import MODEL_PREFIX, tensor_names
from headwise.kernels.collectives import call_collective
from headwise.model.shard import ShardedTransformer
from headwise.model.shard_axes import LAYER_KEY
from headwise.model.transformer import Transformer
from headwise.spec.rank_partition import RankPartition, partition_model
from headwise.training.checkpoint import CHECKSUMS_FILE, CheckpointFolder, folder_checksums
from headwise.training.language_loss import TrainLoss
from headwise.weights.save import write_metadata

SHARDS_FOLDER = "shards"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class TensorShard:
    """A part of a tensor that is in this process: where it begins there, and how large the whole is."""

    tensor: Tensor  # a view: what is read goes where the weights are
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    is_written: bool = True  # False: another process that has it too writes it

    # What torch.distributed.checkpoint asks of a tensor that is not whole.

    def size(self) -> torch.Size:
        """Of the whole."""
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
        self.state_dict = self.original_state_dict = state_dict  # as it is: the usual way forgets what is no tensor
        self.metadata, self.is_coordinator, self.mappings = metadata, is_coordinator, {}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def tensor_shards(model: Transformer, name: str, value: Tensor) -> Iterator[tuple[str, TensorShard]]:
    """A parameter of this process, or what the optimizer remembers of it, as pieces of the whole model's, by name."""
    local_value, start = local_tensor(value).detach(), local_offset(value)
    if not local_value.numel():
        return
    partition = model.partition if isinstance(model, ShardedTransformer) else partition_model(model.spec, 1)[0]
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
    """Where a parameter begins in that of the whole model, and how large that is."""
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
    """The weights of a layer, head by head: each keeps its axis, with one entry."""
    spec, partition = layer.spec, layer.partition
    lower_ranks = [] if partition is None else partition.kv_indices[: partition.collectives.rank]
    lower_rank_kv_ids = (
        {partition.full_spec.kv_head_ids[index] for indices in lower_ranks for index in indices}
        if partition is not None
        else set()
    )
    if parameter == "output_projection.weight":  # (rows, H·e)
        for head_id, block in zip(spec.head_ids, local_tensor.split(spec.value_dim, 1), strict=True):
            full_shape = (spec.width, 1, spec.value_dim)
            yield f"{prefix}{parameter}/1/{head_id}", TensorShard(block.unsqueeze(1), (start, 0, 0), full_shape)
    elif not parameter.startswith("qkv."):  # a number, or some, for each head
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
            for head_id in spec.head_ids if projection == "q" else spec.kv_head_ids:
                low, high = max(row_start, start), min(row_start + channels, end)
                if low < high:
                    rows = local_tensor[low - start : high - start].unsqueeze(0)  # (1, rows, D)
                    offsets = (0, low - row_start, *[0] * (rows.ndim - 2))
                    full_shape, is_replicated = (
                        (1, channels, *rows.shape[2:]),
                        projection != "q" and head_id in lower_rank_kv_ids,
                    )
                    yield (
                        f"{prefix}qkv.{projection}.{kind}/0/{head_id}",
                        TensorShard(rows, offsets, full_shape, is_written=not is_replicated),
                    )
                row_start += channels


class ShardedCheckpointFolder(CheckpointFolder):
    """Checkpoints that all processes write and read together."""

    is_collective = True

    def __init__(self, folder: Path, keep_newest: int, log: Any, process_group: ProcessGroup) -> None:
        super().__init__(folder, keep_newest, log)
        self.process_group = process_group.all_processes

    def save(
        self, loss: TrainLoss, optimizer: torch.optim.Optimizer, state: dict[str, Any], step: int, best_step: int
    ) -> None:
        """Write one, whole or not at all, then drop those that are neither among the newest nor the best."""
        shards = {**_weight_shards(loss), **_moment_shards(loss, optimizer)}
        with ExitStack() as stack:
            new_folder = self._create_folder(stack, step)
            _run_collective(
                lambda: save(
                    shards,
                    storage_writer=_storage_writer(new_folder),
                    planner=_ShardSavePlanner(),
                    **self._dist_kwargs(),
                )
            )  # pyright: ignore
            self.process_group.barrier()
            if self.process_group.is_rank_zero:
                write_metadata(loss.model, new_folder)  # pyright: ignore[reportArgumentType]
                (new_folder / "training.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
                (new_folder / CHECKSUMS_FILE).write_text(
                    json.dumps(folder_checksums(new_folder), indent=2), encoding="utf-8"
                )
        if self.process_group.is_rank_zero:
            self.drop_old(best_step)

    def restore(self, step: int, loss: TrainLoss, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Put a model and its optimizer back to where they were, whatever the number of processes was."""
        folder = self.path(step)
        if not (folder / SHARDS_FOLDER).is_dir():
            raise HeadwiseError(
                f"the checkpoint {folder} is of another layout: it was written with parallel='ddp'. Go on with that."
            )
        shards, saved_names = _weight_shards(loss), tensor_names((folder / SHARDS_FOLDER).glob("*.safetensors"))
        if missing := sorted(set(shards) - saved_names):
            raise HeadwiseError(
                f"the checkpoint {folder} is of another model: {missing[0].removeprefix(MODEL_PREFIX)} is not in it."
            )
        training_state = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        if optimizer is not None:
            for name, value in loss.trainable_parameters().items():
                if any(f"{MOMENTS[0]}:{shard_name}" in saved_names for shard_name in _shard_names(loss, name, value)):
                    count = torch.tensor(float(training_state["step"]), device=local_tensor(value).device)
                    optimizer.state[value] = {"step": count, **{moment: torch.zeros_like(value) for moment in MOMENTS}}
            shards |= _moment_shards(loss, optimizer)
        reader = HuggingFaceStorageReader(str(folder / SHARDS_FOLDER))
        with torch.no_grad():
            _run_collective(
                lambda: load(
                    shards,
                    storage_reader=reader,
                    planner=_ShardLoadPlanner(flatten_state_dict=False),
                    **self._dist_kwargs(),
                )
            )  # pyright: ignore[reportArgumentType]
        return training_state

    def _create_folder(self, stack: ExitStack, step: int) -> Path:
        """The folder all of them write into; what keeps the first from making it is told to all."""
        folder_name: list[Any] = [None]

        def create() -> None:
            folder_name[0] = str(stack.enter_context(atomic_folder(self.path(step), ("training.json", CHECKSUMS_FILE))))

        self.process_group.run_on_rank_zero(create)
        if self.process_group.size > 1:
            call_collective(lambda: dist.broadcast_object_list(folder_name, 0))
        return Path(folder_name[0])

    def _dist_kwargs(self) -> dict[str, Any]:
        return {"no_dist": self.process_group.size == 1}


def _storage_writer(folder: Path) -> HuggingFaceStorageWriter:
    return HuggingFaceStorageWriter(str(folder / SHARDS_FOLDER), save_distributed=True)


def _weight_shards(loss: TrainLoss) -> dict[str, TensorShard]:
    """All weights of the model, frozen ones too, and what the loss has of its own."""
    model = _model(loss)
    shards: dict[str, TensorShard] = {}
    for name, value in model.named_parameters():
        shards |= {f"{MODEL_PREFIX}{shard_name}": shard for shard_name, shard in tensor_shards(model, name, value)}
    for name, value in loss.trainable_parameters().items():
        if name.startswith("loss."):
            shards[f"own:{name}"] = TensorShard(
                value.detach(), (0,) * value.ndim, tuple(value.shape), is_written=_is_first_rank(model)
            )
    return shards


def _moment_shards(loss: TrainLoss, optimizer: torch.optim.Optimizer) -> dict[str, TensorShard]:
    """What the optimizer remembers."""
    model, shards = _model(loss), dict[str, TensorShard]()
    for name, value in loss.trainable_parameters().items():
        for moment, moment_value in optimizer.state.get(value, {}).items():
            if moment not in MOMENTS:
                continue  # how many steps there were is known
            if name.startswith("loss."):
                shards[f"{moment}:{name}"] = TensorShard(
                    moment_value, (0,) * moment_value.ndim, tuple(moment_value.shape), is_written=_is_first_rank(model)
                )
            else:
                shards |= {
                    f"{moment}:{shard_name}": shard for shard_name, shard in tensor_shards(model, name, moment_value)
                }
    return shards


def _shard_names(loss: TrainLoss, name: str, value: nn.Parameter) -> list[str]:
    return (
        [name]
        if name.startswith("loss.")
        else [shard_name for shard_name, _ in tensor_shards(_model(loss), name, value)]
    )


def _model(loss: TrainLoss) -> Transformer:
    return loss.model  # pyright: ignore[reportReturnType]


def _is_first_rank(model: Transformer) -> bool:
    return not isinstance(model, ShardedTransformer) or model.collectives.rank == 0


def _run_collective(operation: Any) -> None:
    """What all processes do together; what went wrong in one of them is told by all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process alone is no mistake
            call_collective(operation)
    except CheckpointException as error:
        first_failure = next(iter(error.failures.values()))[0]
        raise HeadwiseError(
            f"the checkpoint could not be written or read ({first_failure}); nothing was changed."
        ) from None
