"""Reader of the safetensors files that several processes wrote together, each its parts of the tensors.

torch.distributed.checkpoint writes the files: their metadata have the offset of each part in its full tensor. The name of a
tensor may end in /axis/number: then it is entry `number` along that axis of a larger tensor, which is concatenated in the
order of the numbers. Nothing is copied until a tensor is read.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwise.errors import FileFormatError
from headwise.io.weight_readers import WeightReader

SHARDING_INFO_KEY, OFFSETS_KEY = "DCP_SHARDING_INFO", "saved_offsets"
MODEL_PREFIX = "model:"  # names of weights begin with it


class DistributedCheckpointReader(WeightReader):
    """The weights of a sharded checkpoint, read as full tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._shards: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileFormatError(
                f"{folder}: it has no safetensors files, so the checkpoint is incomplete. Use another checkpoint."
            )
        for file in files:
            self._index_shards(file)
        self._entries: dict[str, tuple[int, list[str]]] = {}  # full tensor: its axis, and its entries in order
        for name in self._shards:
            tensor_name, axis, _ = self._parse_name(name)
            self._entries.setdefault(tensor_name, (axis, []))[1].append(name)
        for _, names in self._entries.values():
            names.sort(key=lambda name: self._parse_name(name)[2])
        for tensor_name, (axis, names) in self._entries.items():
            shapes = [self._shape(name) for name in names]
            shape = list(shapes[0])
            if axis >= 0:
                shape[axis] = sum(shape[axis] for shape in shapes)
            self.shapes[tensor_name] = tuple(shape)

    def _index_shards(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as opened:
                sharding_info: dict[str, Any] = json.loads((opened.metadata() or {})[SHARDING_INFO_KEY])
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if name.startswith(MODEL_PREFIX):
                        start = tuple(int(offset) for offset in sharding_info[name][OFFSETS_KEY])
                        shard = opened.get_tensor(name)  # a view of the mapped file
                        if len(start) != shard.ndim or min(start, default=0) < 0:
                            raise ValueError(
                                f"tensor {name}: needs {shard.ndim} offsets, each 0 or greater, but has {start}"
                            )
                        self._shards.setdefault(name.removeprefix(MODEL_PREFIX), []).append((start, shard))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise FileFormatError(
                f"{file}: it is not a part of a sharded checkpoint ({error}). The checkpoint is incomplete or damaged. Use "
                "another checkpoint."
            ) from None

    def _parse_name(self, name: str) -> tuple[str, int, int]:
        tensor_name, *entry = name.split("/")
        if not entry:
            return tensor_name, -1, 0
        if len(entry) != 2 or not all(part.isdecimal() for part in entry):
            raise FileFormatError(
                f"{self.folder}: unexpected tensor name. Got {name!r}. Use a checkpoint written by headwise train."
            )
        return tensor_name, int(entry[0]), int(entry[1])

    def _shape(self, name: str) -> tuple[int, ...]:
        ends = [
            [begin + size for begin, size in zip(start, shard.shape, strict=True)]
            for start, shard in self._shards[name]
        ]
        return tuple(max(end) for end in zip(*ends, strict=True))

    def get(self, name: str) -> Tensor:
        """Read one tensor and concatenate its parts."""
        axis, names = self._entries[name]
        tensors = [self._gather(entry) for entry in names]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, axis)

    def _gather(self, name: str) -> Tensor:
        shards, shape = self._shards[name], self._shape(name)
        if len(shards) == 1 and tuple(shards[0][1].shape) == shape:
            return shards[0][1]
        if sum(shard.numel() for _, shard in shards) != torch.Size(shape).numel():
            raise FileFormatError(
                f"{self.folder}: parts of {name} are missing, so the checkpoint is incomplete. Use another checkpoint."
            )
        tensor = shards[0][1].new_empty(shape)
        for start, shard in shards:
            tensor[tuple(slice(begin, begin + size) for begin, size in zip(start, shard.shape, strict=True))] = shard
        return tensor


def tensor_names(files: Iterable[Path]) -> set[str]:
    """Return the names of all tensors in some files."""
    names: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names
