"""Readers of weight files. They are lazy, memory-map the file and never execute its content.

A reader knows all names and shapes when it is created, and returns tensors on request. Tensors of safetensors files are
views of the memory-mapped file, copied only when they are modified.
"""

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwise.errors import FileFormatError, HeadwiseError, MissingDependencyError, UnsupportedModelError

DEQUANTIZED_VALUES = 1 << 18  # values that are dequantized at once


class WeightReader(ABC):
    """Named tensors of one model.

    Attributes:
        shapes: Shape of each tensor by name.
        default_dtype: Dtype of the weights if the caller does not name one. None means that of the file.
    """

    default_dtype: torch.dtype | None = None

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def get(self, name: str) -> Tensor:
        """Return one tensor, on the CPU."""


class SafetensorsReader(WeightReader):
    """Reader of one safetensors file, or of the shards of an index."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        self.metadata: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            self._map_tensors(file)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def _map_tensors(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as opened:
                self.metadata |= opened.metadata() or {}
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if name in self._tensors:
                        raise FileFormatError(
                            f"{file}: the tensor {name!r} is also in another file of this model. Download the model again."
                        )
                    self._tensors[name] = opened.get_tensor(name)  # a view of the mapped file
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            if isinstance(error, HeadwiseError):
                raise
            raise FileFormatError(
                f"{file}: not a valid safetensors file, or truncated ({error}). Download it again."
            ) from None

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


class TorchReader(WeightReader):
    """Reader of files written by `torch.save`. Only tensors are read; a file with other pickled objects raises an error."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            loaded = _load_tensors(file)
            for name in loaded.keys() & self._tensors.keys():
                raise FileFormatError(
                    f"{file}: the tensor {name!r} is also in another file of this model. Download the model again."
                )
            self._tensors |= loaded
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


def _load_tensors(file: Path) -> dict[str, Tensor]:
    try:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise FileFormatError(
            f"{file}: contains pickled objects other than tensors, which could execute code. It is not loaded. Use a "
            f"safetensors version of the model."
        ) from None
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise FileFormatError(f"{file}: torch cannot read this weight file: {error}") from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise FileFormatError(f"{file}: must contain a state dict (tensors by name). Got {type(loaded).__name__}.")
    return loaded


def _fast_reader(reader: type) -> type:
    """Return gguf's reader with a plain array and a fast parser of string lists.

    A vocabulary and its merges are 100,000 strings, for which gguf makes several arrays each. Here they are decoded in one
    pass over the bytes. If another version of gguf does not call this parser, its own result is used.
    """

    class FastReader(reader):
        def __init__(self, file: str) -> None:
            self.strings: dict[str, list[str]] = {}  # by metadata name
            self._latest: list[str] | None = None
            self._is_nested = False
            super().__init__(file)

        def __setattr__(self, name: str, value: Any) -> None:
            # each slice of an array takes half the time of a slice of a memmap
            super().__setattr__(name, np.asarray(value) if isinstance(value, np.memmap) else value)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            from gguf import GGUFValueType

            head = self.data[orig_offs : orig_offs + 12].tobytes()
            is_little = (sys.byteorder == "little") == (self.byte_order == "I")  # "I": the order of this machine
            order: Literal["little", "big"] = "little" if is_little else "big"
            types = [GGUFValueType.ARRAY, GGUFValueType.STRING]
            if self._is_nested or raw_type != types[0] or int.from_bytes(head[:4], order) != types[1]:
                self._is_nested, previous = True, self._is_nested  # lists in lists are read by gguf
                result = super()._get_field_parts(orig_offs, raw_type)
                self._is_nested = previous
                return result
            self._latest, size = _read_strings(self.data[orig_offs + 12 :], int.from_bytes(head[4:], order), order)
            return 12 + size, [], [], types

        def _push_field(self, field: Any, *, skip_sum: bool = False) -> int:
            if self._latest is not None:
                self.strings[field.name], self._latest = self._latest, None
            return super()._push_field(field, skip_sum)

    return FastReader


def _dequantize_in_blocks(tensor: Any, shape: tuple[int, ...]) -> Tensor:
    """Dequantize a tensor into aligned memory, a few rows at a time, so that no second copy of it is held."""
    from gguf.quants import dequantize

    rows = tensor.data.reshape(-1, tensor.data.shape[-1])  # (rows, bytes of a row)
    dequantized = torch.empty(len(rows), shape[-1], dtype=torch.float32)
    out, step = dequantized.numpy(), max(1, DEQUANTIZED_VALUES // max(1, shape[-1]))
    for start in range(0, len(rows), step):
        out[start : start + step] = dequantize(rows[start : start + step], tensor.tensor_type)
    return dequantized


def _read_strings(array: np.ndarray, count: int, byte_order: Literal["little", "big"]) -> tuple[list[str], int]:
    """Return strings that are stored as a length of 8 bytes and UTF-8 each, and their size in bytes."""
    view, strings, position = array.data, [], 0
    for _ in range(count):
        start = position + 8
        position = start + int.from_bytes(view[position:start], byte_order)
        if position > len(view):
            raise ValueError("a string ends after the end of the file")
        strings.append(str(view[start:position], "utf-8"))
    return strings, position


class GGUFReader(WeightReader):
    """Reader of GGUF files, based on the `gguf` package. Quantized tensors are dequantized to float32 on request."""

    default_dtype = torch.float32  # the types of the files are for storage

    def __init__(self, file: Path) -> None:
        super().__init__()
        try:
            import gguf
        except ImportError:
            raise MissingDependencyError(
                "the gguf package is required to read GGUF files. Run: pip install 'headwise[gguf]'"
            ) from None
        try:
            self._reader = _fast_reader(gguf.GGUFReader)(str(file))
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise FileFormatError(f"{file}: not a GGUF file, or truncated: {error}") from None
        self._file = file
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def fields(self) -> dict[str, Any]:
        """Return the metadata of the file."""
        strings = self._reader.strings
        return {
            name: strings[name] if name in strings else field.contents() for name, field in self._reader.fields.items()
        }

    def get(self, name: str) -> Tensor:
        import gguf

        tensor = self._tensors[name]
        tensor_type = tensor.tensor_type
        if tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            dequantized = torch.tensor(tensor.data)  # a copy at a multiple of 64 bytes; numpy's memory is not aligned
        else:
            try:
                dequantized = _dequantize_in_blocks(tensor, self.shapes[name])
            except (NotImplementedError, KeyError):
                raise UnsupportedModelError(
                    f"{self._file}: the tensor {name!r} has type {tensor_type.name}, which the gguf package cannot "
                    f"dequantize. Use a file with another quantization, for example Q8_0."
                ) from None
        return dequantized.view(self.shapes[name])


class RenamedReader(WeightReader):
    """Reader that exposes the tensors of another reader under new names."""

    def __init__(self, reader: WeightReader, rename: Callable[[str], str]) -> None:
        super().__init__()
        self._reader = reader
        self._names = {rename(name): name for name in reader.shapes}
        if len(self._names) != len(reader.shapes):
            duplicate = next(name for name in reader.shapes if self._names[rename(name)] != name)
            raise FileFormatError(
                f"the tensor {rename(duplicate)!r} is stored twice: as {duplicate!r} and as "
                f"{self._names[rename(duplicate)]!r} (one is its name in files of format 1, the other in format 2). Save the "
                f"model again."
            )
        self.shapes = {name: reader.shapes[old_name] for name, old_name in self._names.items()}

    def get(self, name: str) -> Tensor:
        """Return one tensor by its new name."""
        return self._reader.get(self._names[name])
