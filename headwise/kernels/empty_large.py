"""Allocates large tensors in huge pages."""

from math import prod

import numpy as np
import torch
from torch import Tensor

MIN_BYTES = 1 << 22  # NumPy asks for huge pages from this size
ALIGNMENT = 64  # bytes, as in torch's allocator


def empty_large(like: Tensor, *shape: int) -> Tensor:
    """Return an uninitialized tensor with the dtype and device of another, in huge pages if it is large and on a CPU.

    The first write to a page of new memory costs a page fault, which for a map of 200 MB takes as long as its matrix product.
    NumPy asks Linux for pages of 2 MB instead of 4 KB, and torch does not.

    >>> empty_large(torch.ones(1), 2, 3).shape
    torch.Size([2, 3])
    """
    num_bytes = prod(shape) * like.element_size()
    if num_bytes < MIN_BYTES or like.device.type != "cpu" or type(like) is not Tensor:
        return like.new_empty(shape)
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    storage = torch.from_numpy(memory).untyped_storage()
    return like.new_empty(0).set_(storage, offset // like.element_size(), shape)  # pyright: ignore[reportCallIssue]
