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

from headwise.distributed.parallel_strategy import local, offset
from headwise.distributed.process_group import Team
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.io.atomic_write import whole_folder
from headwise.io.sharded_reader import MODEL, names_there
from headwise.kernels.collectives import reached
from headwise.model.shard import Shard
from headwise.model.shard_axes import LAYER
from headwise.model.transformer import Transformer
from headwise.spec.partition import Share, share_out
from headwise.training.checkpoint import CHECKSUMS, Checkpoints, sums_of
from headwise.training.loss import Loss
from headwise.weights.save import write_about

PIECES = "pieces"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A part of a tensor that is in this process: where it begins there, and how large the whole is."""

    tensor: Tensor  # a view: what is read goes where the weights are
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    written: bool = True  # False: another process that has it too writes it

    # What torch.distributed.checkpoint asks of a tensor that is not whole.

    def size(self) -> torch.Size:
        """Of the whole."""
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.tensor), self.size())
        return [WriteItem(MetadataIndex(name, self.offsets), WriteItemType.SHARD, tensor_data=data)] * self.written

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.size())


class _Saves(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


class _Loads(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = state_dict  # as it is: the usual way forgets what is no tensor
        self.metadata, self.is_coordinator, self.mappings = metadata, is_coordinator, {}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].tensor


def pieces_of(model: Transformer, name: str, value: Tensor) -> Iterator[tuple[str, TensorPiece]]:
    """A parameter of this process, or what the optimizer remembers of it, as pieces of the whole model's, by name."""
    here, start = local(value).detach(), offset(value)
    if not here.numel():
        return
    share = model.share if isinstance(model, Shard) else share_out(model.spec, 1)[0]
    found = LAYER.fullmatch(name)
    if found is not None and found[4] != "write.bias":
        layer = model.get_submodule(name.removesuffix(f".{found[4]}"))
        assert isinstance(layer, MultiHeadAttention)
        yield from _by_head(layer, name.removesuffix(found[4]), found[4], here, start)
        return
    first, whole = _in_whole(model, share, name, value)
    at = (first[0] + start, *first[1:])
    shared = whole == tuple(value.shape) and share.number > 0  # all processes that share heads have it
    yield name, TensorPiece(here, at, whole, written=not shared)


def _in_whole(model: Transformer, share: Share, name: str, value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where a parameter begins in that of the whole model, and how large that is."""
    spec, shape = model.spec, tuple(value.shape)
    if ".mlp.down." in name and len(shape) == 2:
        return (0, share.hidden[0]), (shape[0], spec.hidden)
    if ".mlp.up." in name or ".mlp.gate." in name:
        return (share.hidden[0], *[0] * (len(shape) - 1)), (spec.hidden, *shape[1:])
    if name.startswith(("embed.tokens.", "output.vocabulary.")):
        return (share.vocab[0], *[0] * (len(shape) - 1)), (spec.vocab, *shape[1:])
    return (0,) * len(shape), shape


def _by_head(
    layer: MultiHeadAttention, prefix: str, rest: str, here: Tensor, start: int
) -> Iterator[tuple[str, TensorPiece]]:
    """The weights of a layer, head by head: each keeps its axis, with one entry."""
    spec, share = layer.spec, layer.share
    before = [] if share is None else share.key_places[: share.together.rank]
    taken = {share.whole.kv_ids[place] for some in before for place in some} if share is not None else set()
    if rest == "write.weight":  # (rows, H·e)
        for number, block in zip(spec.head_ids, here.split(spec.value_dim, 1), strict=True):
            whole = (spec.width, 1, spec.value_dim)
            yield f"{prefix}{rest}/1/{number}", TensorPiece(block.unsqueeze(1), (start, 0, 0), whole)
    elif not rest.startswith("read."):  # a number, or some, for each head
        for row, one in enumerate(here.split(1)):
            yield f"{prefix}{rest}/0/{spec.head_ids[start + row]}", TensorPiece(one, (0,) * one.ndim, tuple(one.shape))
    else:
        slab, _, kind = rest.removeprefix("read.").rpartition("_")
        top, end = 0, start + len(here)
        for letter in slab:
            channels = layer.read.sizes[letter][1]
            for number in spec.head_ids if letter == "q" else spec.kv_ids:
                low, high = max(top, start), min(top + channels, end)
                if low < high:
                    rows = here[low - start : high - start].unsqueeze(0)  # (1, rows, D)
                    at = (0, low - top, *[0] * (rows.ndim - 2))
                    whole, copied = (1, channels, *rows.shape[2:]), letter != "q" and number in taken
                    yield f"{prefix}read.{letter}.{kind}/0/{number}", TensorPiece(rows, at, whole, written=not copied)
                top += channels


class PieceCheckpoints(Checkpoints):
    """Checkpoints that all processes write and read together."""

    together = True

    def __init__(self, folder: Path, keep: int, say: Any, team: Team) -> None:
        super().__init__(folder, keep, say)
        self.team = team.everyone

    def save(self, loss: Loss, optimizer: torch.optim.Optimizer, state: dict[str, Any], step: int, best: int) -> None:
        """Write one, whole or not at all, then drop those that are neither among the newest nor the best."""
        items = {**_weights(loss), **_moments(loss, optimizer)}
        with ExitStack() as stack:
            new = self._claim(stack, step)
            _ask(lambda: save(items, storage_writer=_writer(new), planner=_Saves(), **self._those()))  # pyright: ignore
            self.team.wait()
            if self.team.leads:
                write_about(loss.model, new)  # pyright: ignore[reportArgumentType]
                (new / "training.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
                (new / CHECKSUMS).write_text(json.dumps(sums_of(new), indent=2), encoding="utf-8")
        if self.team.leads:
            self.drop_old(best)

    def restore(self, step: int, loss: Loss, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Put a model and its optimizer back to where they were, whatever the number of processes was."""
        folder = self.path(step)
        if not (folder / PIECES).is_dir():
            raise HeadwiseError(
                f"the checkpoint {folder} is of another layout: it was written with parallel='ddp'. Go on with that."
            )
        items, there = _weights(loss), names_there((folder / PIECES).glob("*.safetensors"))
        if missing := sorted(set(items) - there):
            raise HeadwiseError(
                f"the checkpoint {folder} is of another model: {missing[0].removeprefix(MODEL)} is not in it."
            )
        told = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        if optimizer is not None:
            for name, value in loss.learning().items():
                if any(f"{MOMENTS[0]}:{part}" in there for part in _names(loss, name, value)):
                    count = torch.tensor(float(told["step"]), device=local(value).device)
                    optimizer.state[value] = {"step": count, **{what: torch.zeros_like(value) for what in MOMENTS}}
            items |= _moments(loss, optimizer)
        reader = HuggingFaceStorageReader(str(folder / PIECES))
        with torch.no_grad():
            _ask(lambda: load(items, storage_reader=reader, planner=_Loads(flatten_state_dict=False), **self._those()))  # pyright: ignore[reportArgumentType]
        return told

    def _claim(self, stack: ExitStack, step: int) -> Path:
        """The folder all of them write into; what keeps the first from making it is told to all."""
        made: list[Any] = [None]

        def make() -> None:
            made[0] = str(stack.enter_context(whole_folder(self.path(step), ("training.json", CHECKSUMS))))

        self.team.first_alone(make)
        if self.team.size > 1:
            reached(lambda: dist.broadcast_object_list(made, 0))
        return Path(made[0])

    def _those(self) -> dict[str, Any]:
        return {"no_dist": self.team.size == 1}


def _writer(folder: Path) -> HuggingFaceStorageWriter:
    return HuggingFaceStorageWriter(str(folder / PIECES), save_distributed=True)


def _weights(loss: Loss) -> dict[str, TensorPiece]:
    """All weights of the model, frozen ones too, and what the loss has of its own."""
    model = _model(loss)
    made: dict[str, TensorPiece] = {}
    for name, value in model.named_parameters():
        made |= {f"{MODEL}{part}": piece for part, piece in pieces_of(model, name, value)}
    for name, value in loss.learning().items():
        if name.startswith("loss."):
            made[f"own:{name}"] = TensorPiece(
                value.detach(), (0,) * value.ndim, tuple(value.shape), written=_leads(model)
            )
    return made


def _moments(loss: Loss, optimizer: torch.optim.Optimizer) -> dict[str, TensorPiece]:
    """What the optimizer remembers."""
    model, made = _model(loss), dict[str, TensorPiece]()
    for name, value in loss.learning().items():
        for what, kept in optimizer.state.get(value, {}).items():
            if what not in MOMENTS:
                continue  # how many steps there were is known
            if name.startswith("loss."):
                made[f"{what}:{name}"] = TensorPiece(kept, (0,) * kept.ndim, tuple(kept.shape), written=_leads(model))
            else:
                made |= {f"{what}:{part}": piece for part, piece in pieces_of(model, name, kept)}
    return made


def _names(loss: Loss, name: str, value: nn.Parameter) -> list[str]:
    return [name] if name.startswith("loss.") else [part for part, _ in pieces_of(_model(loss), name, value)]


def _model(loss: Loss) -> Transformer:
    return loss.model  # pyright: ignore[reportReturnType]


def _leads(model: Transformer) -> bool:
    return not isinstance(model, Shard) or model.together.rank == 0


def _ask(ask: Any) -> None:
    """What all processes do together; what went wrong in one of them is told by all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process alone is no mistake
            reached(ask)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise HeadwiseError(f"the checkpoint could not be written or read ({first}); nothing was changed.") from None
