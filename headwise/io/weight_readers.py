"""Reading weight files: lazily, memory-mapped, and never by running anything that is in them.

A reader lists names and shapes at once and gives a tensor when asked. Tensors of safetensors files are views of the mapped
file: nothing is copied until it is written to.
"""

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwise.errors import HeadwiseError


class WeightReader(ABC):
    """Named tensors of one model."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def get(self, name: str) -> Tensor:
        """One tensor, on the CPU."""


class SafetensorsReader(WeightReader):
    """One safetensors file, or several that an index binds together."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        self.metadata: dict[str, str] = {}
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            self._open(file)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def _open(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as opened:
                self.metadata |= opened.metadata() or {}
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    if name in self._tensors:
                        raise HeadwiseError(
                            f"the tensor {name!r} is in two files, once more in {file}; fetch them again."
                        )
                    self._tensors[name] = opened.get_tensor(name)  # a view of the mapped file
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            if isinstance(error, HeadwiseError):
                raise
            raise HeadwiseError(f"{file} is no whole safetensors file ({error}); fetch it again.") from None

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


class TorchReader(WeightReader):
    """A file written by torch.save. Only tensors are read; one that carries code is refused, not run."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        self._tensors: dict[str, Tensor] = {}
        for file in files:
            loaded = _load_tensors(file)
            for name in loaded.keys() & self._tensors.keys():
                raise HeadwiseError(f"the tensor {name!r} is in two files, once more in {file}; fetch them again.")
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
        raise HeadwiseError(
            f"{file} holds pickled objects other than tensors, which could run code; it was refused. "
            f"Ask for the model as safetensors."
        ) from None
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise HeadwiseError(f"{file} is not a weight file torch can read: {error}") from None
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise HeadwiseError(f"{file} is not a table of tensors; a state dict is expected.")
    return loaded


def _array_backed(reader: type) -> type:
    """The package's reader on a plain array: each of the 200,000 slices of a vocabulary is half as slow as of a memmap."""

    class ArrayBackedReader(reader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if isinstance(value, np.memmap) else value)

    return ArrayBackedReader


class GGUFReader(WeightReader):
    """A GGUF file, through the `gguf` package; quantised tensors are dequantised when asked for, to float32."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        try:
            import gguf
        except ImportError:
            raise HeadwiseError("reading GGUF needs the gguf package: pip install 'headwise[gguf]'.") from None
        try:
            self._reader = _array_backed(gguf.GGUFReader)(str(file))
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise HeadwiseError(f"{file} is not a GGUF file, or is cut short: {error}") from None
        self._file = file
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def fields(self) -> dict[str, Any]:
        """The file's metadata."""
        return {name: field.contents() for name, field in self._reader.fields.items()}

    def get(self, name: str) -> Tensor:
        import gguf

        tensor = self._tensors[name]
        tensor_type = tensor.tensor_type
        if tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            dequantized = torch.tensor(tensor.data)  # torch's memory begins at multiples of 64, numpy's does not
        else:
            try:
                dequantized = torch.tensor(gguf.quants.dequantize(tensor.data, tensor_type))
            except (NotImplementedError, KeyError):
                raise HeadwiseError(
                    f"{self._file} keeps {name!r} as {tensor_type.name}, which the gguf package does not dequantise."
                ) from None
        return dequantized.view(self.shapes[name])


class RenamedReader(WeightReader):
    """The tensors of another reader under other names."""

    def __init__(self, reader: WeightReader, rename: Callable[[str], str]) -> None:
        super().__init__()
        self._reader = reader
        self._names = {rename(name): name for name in reader.shapes}
        if len(self._names) != len(reader.shapes):
            raise HeadwiseError(
                "a tensor is stored twice, under its names of format 1 and format 2; save the model again."
            )
        self.shapes = {name: reader.shapes[old_name] for name, old_name in self._names.items()}

    def get(self, name: str) -> Tensor:
        """One tensor by its new name."""
        return self._reader.get(self._names[name])
