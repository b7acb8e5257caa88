"""Reader of Whisper models in the ggml format of whisper.cpp: float32 and float16 tensors under OpenAI's names.

Layout: magic `lmgg`; 11 integers; mel filters; vocabulary; tensors until the end of the file. Sizes are checked before memory
is allocated, and nothing in the file is executed.

    tensor: number of dimensions, length of the name, type (0: float32, 1: float16), dimensions (fastest first), name, data
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwise.errors import FileFormatError, UnsupportedModelError

MAGIC = b"lmgg"
FIELDS = (
    "n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer", "n_text_ctx", "n_text_state",
    "n_text_head", "n_text_layer", "n_mels", "ftype",
)  # fmt: skip
DTYPES = {0: torch.float32, 1: torch.float16}
MAX_FIELD, MAX_NAME, MAX_DIMS = 1 << 20, 256, 4


@dataclass(frozen=True, eq=False)
class GGMLWhisperFile:
    """Contents of a ggml Whisper file.

    Attributes:
        sizes: Sizes of the model by the names of `FIELDS`.
        tokens: Bytes of each token of the vocabulary. Special tokens are not included.
        tensors: Tensors by OpenAI's names, in the dtype of the file.
    """

    sizes: dict[str, int]
    tokens: tuple[bytes, ...]
    tensors: dict[str, Tensor]


def is_ggml_whisper(path: Path) -> bool:
    """Return whether a file starts with the magic of ggml."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_ggml_whisper(path: Path) -> GGMLWhisperFile:
    """Read a ggml Whisper file. Tensors are copied from the file."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_BinaryReader(data, path))
    except (OSError, ValueError) as error:
        if isinstance(error, FileFormatError | UnsupportedModelError):
            raise
        raise FileFormatError(f"{path}: could not be read: {error}. Download the file again.") from None


class _BinaryReader:
    """Position in a file. Reads past the end raise an error."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.position = data, path, 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.position + count > len(self.data):
            raise FileFormatError(f"{self.path}: the file ends early, at byte {len(self.data)}. Download it again.")
        chunk = self.data[self.position : self.position + count]
        self.position += count
        return chunk

    def integers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}i", self.take(4 * count))

    @property
    def at_end(self) -> bool:
        return self.position == len(self.data)


def _read(cursor: _BinaryReader) -> GGMLWhisperFile:
    if cursor.take(4) != MAGIC:
        raise FileFormatError(f"{cursor.path}: not a ggml file. Use a ggml model of whisper.cpp.")
    sizes: dict[str, int] = dict(zip(FIELDS, cursor.integers(len(FIELDS)), strict=True))
    if not all(0 < sizes[name] <= MAX_FIELD for name in FIELDS[:-1]):
        raise FileFormatError(f"{cursor.path}: invalid sizes {sizes}. Download the file again.")
    if sizes["ftype"] not in DTYPES:
        raise UnsupportedModelError(
            f"{cursor.path}: quantized ggml files are not supported. Got type {sizes['ftype']}. Use the file in float16."
        )
    rows, columns = cursor.integers(2)
    if not (0 < rows <= MAX_FIELD and 0 < columns <= MAX_FIELD):
        raise FileFormatError(f"{cursor.path}: invalid mel filters, {rows} × {columns}. Download the file again.")
    cursor.take(4 * rows * columns)
    (num_tokens,) = cursor.integers(1)
    if not 0 <= num_tokens <= sizes["n_vocab"]:
        raise FileFormatError(f"{cursor.path}: invalid vocabulary of {num_tokens} tokens. Download the file again.")
    tokens = tuple(cursor.take(cursor.integers(1)[0]) for _ in range(num_tokens))
    tensors: dict[str, Tensor] = {}
    while not cursor.at_end:
        name, tensor = _read_tensor(cursor)
        tensors[name] = tensor
    return GGMLWhisperFile(sizes, tokens, tensors)


def _read_tensor(cursor: _BinaryReader) -> tuple[str, Tensor]:
    num_dims, name_length, kind = cursor.integers(3)
    if not (0 < num_dims <= MAX_DIMS and 0 < name_length <= MAX_NAME):
        raise FileFormatError(
            f"{cursor.path}: damaged tensor header at byte {cursor.position}. Download the file again."
        )
    if kind not in DTYPES:
        raise UnsupportedModelError(f"{cursor.path}: a tensor has type {kind}. Only float32 and float16 are supported.")
    shape = cursor.integers(num_dims)[::-1]  # the file lists the fastest dimension first
    name = cursor.take(name_length).decode("utf-8", "replace")
    if not all(0 < size <= MAX_FIELD for size in shape):
        raise FileFormatError(f"{cursor.path}: tensor {name!r} has an invalid shape {shape}. Download the file again.")
    count = 1
    for size in shape:
        count *= size
    raw = bytearray(cursor.take(count * DTYPES[kind].itemsize))
    return name, torch.frombuffer(raw, dtype=DTYPES[kind]).reshape(shape)
