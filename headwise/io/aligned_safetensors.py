"""Read and write safetensors files whose tensors start at multiples of 64 bytes.

On CPUs without AVX-512 the address of a weight selects the code path of a matrix product, so the same weights at another
address can change the last bit of the output. Torch allocates at multiples of 64 bytes, but a memory-mapped tensor keeps its
offset in the file. The format (https://huggingface.co/docs/safetensors) does not allow gaps between tensors, but it does
allow padding after the header. Therefore the data section starts at a multiple of 64, tensors whose size is a multiple of 64
come first, and the few remaining unaligned tensors are copied when they are read.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from headwise.errors import ArgumentError

ALIGNMENT = 64  # alignment of torch's CPU allocator, in bytes
SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
INTEGER_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def align(tensor: Tensor) -> Tensor:
    """Return the tensor if it starts at a multiple of 64 bytes, else an aligned copy.

    >>> unaligned = torch.arange(20.0)[1:]
    >>> copy = align(unaligned)
    >>> copy.data_ptr() % 64, torch.equal(copy, unaligned), align(copy) is copy
    (0, True, True)
    """
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def write_tensors(
    tensors: Mapping[str, Tensor],
    file: Path,
    metadata: Mapping[str, str] | None = None,
    get: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a safetensors file that can be memory-mapped without copies.

    Args:
        tensors: Tensors by name. If `get` is given, only their dtypes and shapes are used.
        file: Output file.
        metadata: Entries of the header's `__metadata__`.
        get: Returns the values of one tensor by name. Called once per tensor, so that the model need not fit in memory.
    """
    order = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT > 0, -tensors[name].element_size()))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise ArgumentError(
                f"tensors[{name!r}]: dtype {tensor.dtype} cannot be stored. Convert the tensor to one of "
                f"{', '.join(str(dtype) for dtype in SAFETENSORS_DTYPES)}."
            )
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    header_bytes = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    header_bytes += b" " * (-(8 + len(header_bytes)) % ALIGNMENT)  # the length of the header precedes it, in 8 bytes
    with open(file, "wb") as out:
        out.write(len(header_bytes).to_bytes(8, "little") + header_bytes)
        for name in order:
            template = tensors[name]
            tensor = template if get is None else get(name) if template.numel() else torch.empty(template.shape)
            if tensor.shape != template.shape:
                raise ArgumentError(
                    f"get({name!r}): returned a tensor of shape {tuple(tensor.shape)}, expected {tuple(template.shape)}."
                )
            flat = tensor.detach().to("cpu", template.dtype).contiguous().flatten()
            integers = flat.view(INTEGER_DTYPES[template.element_size()]).numpy()
            out.write((integers if sys.byteorder == "little" else integers.byteswap()).data)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, memory-mapped; unaligned tensors are copied."""
    return {name: align(tensor) for name, tensor in load_file(file).items()}
