"""Tensors that begin at multiples of 64 bytes, in files and in memory.

Where a weight begins decides which way through a matrix product the CPU takes, and so the last bit of what comes out: on
processors without AVX-512, outputs move by one rounding when the same numbers lie at another address. Memory that torch
allocates begins at multiples of 64; a tensor mapped from a file begins where it lies in the file. The format
(https://huggingface.co/docs/safetensors) allows no holes between tensors, but spaces after its header: so the data begin
at a multiple of 64, tensors whose size is one come first, and the few that are left crooked are copied when read.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from headwise.errors import HeadwiseError

ALIGNMENT = 64  # what torch's allocator gives on a CPU
SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
INTEGER_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def align(tensor: Tensor) -> Tensor:
    """The tensor itself if it begins at a multiple of 64 bytes, or a copy that does.

    >>> crooked = torch.arange(20.0)[1:]
    >>> copy = align(crooked)
    >>> copy.data_ptr() % 64, torch.equal(copy, crooked), align(copy) is copy
    (0, True, True)
    """
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def write_tensors(
    tensors: Mapping[str, Tensor],
    file: Path,
    metadata: Mapping[str, str] | None = None,
    get: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a safetensors file that can be mapped and used as it lies.

    With `get` the tensors tell names, types and shapes alone; their numbers are asked for one after the other.
    """
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT > 0, -tensors[name].element_size()))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise HeadwiseError(f"{name} is of type {tensor.dtype}, which is not written; convert it first.")
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    header_bytes = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    header_bytes += b" " * (-(8 + len(header_bytes)) % ALIGNMENT)  # eight bytes before it tell its length
    with open(file, "wb") as out:
        out.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for name in order:
            template = tensors[name]
            tensor = template if get is None else get(name) if template.numel() else torch.empty(template.shape)
            if tensor.shape != template.shape:
                raise HeadwiseError(f"{name} is {tuple(tensor.shape)}, expected {tuple(template.shape)}.")
            flat = tensor.detach().to("cpu", template.dtype).contiguous().flatten()
            integers = flat.view(INTEGER_DTYPES[template.element_size()]).numpy()
            out.write((integers if sys.byteorder == "little" else integers.byteswap()).data)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, mapped; crooked ones are copied."""
    return {name: align(tensor) for name, tensor in load_file(file).items()}
