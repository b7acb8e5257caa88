"""Tensors that several processes wrote, each its pieces: read as if they were whole.

The files are safetensors as torch.distributed.checkpoint writes and reads them: their metadata say where each piece begins in
the tensor it is a part of. A tensor's name may end in /axis/number: then it is entry `number` along that axis of a larger
one, which is put together in the order of the numbers. Nothing is copied until a tensor is asked for.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.io.readers import Reader

INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
MODEL = "model:"  # what the names of weights begin with


class PiecesReader(Reader):
    """The weights among such files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._pieces: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise HeadwiseError(f"{folder} holds no pieces of a model; the checkpoint is not whole.")
        for file in files:
            self._open(file)
        self._parts: dict[str, tuple[int, list[str]]] = {}  # a whole tensor: its axis, and its entries in their order
        for name in self._pieces:
            whole, axis, _ = self._read_name(name)
            self._parts.setdefault(whole, (axis, []))[1].append(name)
        for _, names in self._parts.values():
            names.sort(key=lambda name: self._read_name(name)[2])
        for whole, (axis, names) in self._parts.items():
            shapes = [self._shape(name) for name in names]
            shape = list(shapes[0])
            if axis >= 0:
                shape[axis] = sum(shape[axis] for shape in shapes)
            self.shapes[whole] = tuple(shape)

    def _open(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as opened:
                where: dict[str, Any] = json.loads((opened.metadata() or {})[INFO])
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    if name.startswith(MODEL):
                        start = tuple(int(number) for number in where[name][OFFSETS])
                        piece = opened.get_tensor(name)  # a view of the mapped file
                        if len(start) != piece.ndim or min(start, default=0) < 0:
                            raise ValueError(f"{name} begins at {start}")
                        self._pieces.setdefault(name.removeprefix(MODEL), []).append((start, piece))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise HeadwiseError(f"{file} is no file of pieces ({error}); the checkpoint is not whole.") from None

    def _read_name(self, name: str) -> tuple[str, int, int]:
        whole, *entry = name.split("/")
        if not entry:
            return whole, -1, 0
        if len(entry) != 2 or not all(part.isdecimal() for part in entry):
            raise HeadwiseError(f"{self.folder} holds a piece {name!r}, which is not named as pieces are.")
        return whole, int(entry[0]), int(entry[1])

    def _shape(self, name: str) -> tuple[int, ...]:
        ends = [[at + size for at, size in zip(start, piece.shape, strict=True)] for start, piece in self._pieces[name]]
        return tuple(max(end) for end in zip(*ends, strict=True))

    def get(self, name: str) -> Tensor:
        """One tensor, put together."""
        axis, names = self._parts[name]
        made = [self._whole(part) for part in names]
        return made[0] if len(made) == 1 else torch.cat(made, axis)

    def _whole(self, name: str) -> Tensor:
        pieces, shape = self._pieces[name], self._shape(name)
        if len(pieces) == 1 and tuple(pieces[0][1].shape) == shape:
            return pieces[0][1]
        if sum(piece.numel() for _, piece in pieces) != torch.Size(shape).numel():
            raise HeadwiseError(f"{self.folder} does not hold all of {name}; the checkpoint is not whole.")
        made = pieces[0][1].new_empty(shape)
        for start, piece in pieces:
            made[tuple(slice(at, at + size) for at, size in zip(start, piece.shape, strict=True))] = piece
        return made


def names_there(files: Iterable[Path]) -> set[str]:
    """The names of all tensors in some files."""
    found: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            found |= set(opened.keys())
    return found
