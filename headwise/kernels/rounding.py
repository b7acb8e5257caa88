"""Numbers at few bits: symmetric, in groups of channels, each with a scale of its own.

Within a group s = max|x| / (2^(b−1) − 1) and x becomes s · round(x / s). A row of 64 channels at 8 bits takes 64 bytes and
two scales of 4; at 4 bits two numbers share a byte.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32  # channels that share a scale


def to_codes(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers, (…, bytes or channels), and scales, (…, groups), of (…, d).

    >>> codes, scales = to_codes(torch.tensor([[-7.0, 3.0, 0.0, 2.0]]), 4)
    >>> from_codes(codes, scales, 4, 4, torch.float32)
    tensor([[-7.,  3.,  0.,  2.]])
    """
    d, most = x.shape[-1], 2 ** (bits - 1) - 1
    size = min(GROUP, d)
    groups = F.pad(x.detach().float(), (0, -d % size)).unflatten(-1, (-1, size))  # (…, groups, size)
    scales = groups.abs().amax(-1) / most
    safe = torch.where(scales > 0, scales, 1.0)
    codes = (groups / safe[..., None]).round_().clamp_(-most, most).flatten(-2)[..., :d]  # (…, d)
    if bits > 8:
        return codes.to(torch.int16), scales
    codes = codes.to(torch.int8)
    if bits == 8:
        return codes, scales
    halves = (F.pad(codes, (0, d % 2)) + 8).to(torch.uint8).unflatten(-1, (-1, 2))  # 1 to 15
    return halves[..., 0] | (halves[..., 1] << 4), scales


def from_codes(codes: Tensor, scales: Tensor, bits: int, d: int, dtype: torch.dtype) -> Tensor:
    """The numbers again: (…, d)."""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :d].to(torch.int8) - 8
    size = min(GROUP, d)
    if d % size:
        return (codes * scales.repeat_interleave(size, -1)[..., :d]).to(dtype)
    return (codes.unflatten(-1, (-1, size)) * scales[..., None]).flatten(-2).to(dtype)


def bytes_of_a_row(d: int, bits: int, element: int = 4) -> int:
    """What d channels take, their scales among it; at 32 bits they are kept as they are, `element` bytes each."""
    if bits == 32:
        return d * element
    return math.ceil(d * bits / 8) + 4 * math.ceil(d / min(GROUP, d))


def rounded(x: Tensor, bits: int) -> Tensor:
    """(…, d) as it comes back from so many bits; to gradients it is x itself."""
    return x if bits == 32 else _Rounded.apply(x, bits)  # pyright: ignore[reportReturnType]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        return from_codes(*to_codes(x, bits), bits, x.shape[-1], x.dtype)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return slope, None
