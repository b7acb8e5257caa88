"""Numbers at few bits: symmetric, in groups of channels, each with a scale of its own.

Within a group s = max|x| / (2^(b−1) − 1) and x becomes s · round(x / s). A row of 64 channels at 8 bits takes 64 bytes and
two scales of 4; at 4 bits two numbers share a byte, at 3 eight share three, at 2 four share one. What is kept as the scale is
max|x| itself: so the largest number of a group comes back bitwise, and what was rounded once is rounded to itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.spec.weight_bits import GROUP


def to_codes(x: Tensor, bits: int, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Whole numbers, packed, (…, bytes or channels), and scales, (…, groups), of (…, d).

    >>> codes, scales = to_codes(torch.tensor([[-7.0, 3.0, 0.0, 2.0]]), 4)
    >>> from_codes(codes, scales, 4, 4, torch.float32)
    tensor([[-7.,  3.,  0.,  2.]])
    """
    d, most = x.shape[-1], 2 ** (bits - 1) - 1
    size = max(1, min(group, d))
    groups = F.pad(x.detach().float(), (0, -d % size)).unflatten(-1, (-1, size))  # (…, groups, size)
    scales = groups.abs().amax(-1)
    steps = torch.where(scales > 0, scales / most, 1.0)
    codes = (groups / steps[..., None]).round_().clamp_(-most, most).flatten(-2)[..., :d]  # (…, d)
    if bits > 8:
        return codes.to(torch.int16), scales
    codes = codes.to(torch.int8)
    if bits == 8:
        return codes, scales
    return _pack((codes + (most + 1)).to(torch.uint8), bits), scales  # from 1


def from_codes(codes: Tensor, scales: Tensor, bits: int, d: int, dtype: torch.dtype, group: int = GROUP) -> Tensor:
    """The numbers again: (…, d)."""
    most = 2 ** (bits - 1) - 1
    if bits < 8:
        codes = _unpack(codes, bits)[..., :d].to(torch.int8) - (most + 1)
    size, shares = max(1, min(group, d)), codes / most  # −1 to 1
    if d % size:
        return (shares * scales.repeat_interleave(size, -1)[..., :d]).to(dtype)
    return (shares.unflatten(-1, (-1, size)) * scales[..., None]).flatten(-2).to(dtype)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes below 2^bits, side by side, the first in the lowest bits: (…, d) → (…, ⌈d·bits/8⌉)"""
    d = codes.shape[-1]
    if bits == 4:
        halves = F.pad(codes, (0, d % 2)).unflatten(-1, (-1, 2))
        return halves[..., 0] | (halves[..., 1] << 4)
    eight = F.pad(codes, (0, -d % 8)).unflatten(-1, (-1, 8)).int()  # (…, n, 8)
    words = (eight << torch.arange(0, 8 * bits, bits, device=codes.device)).sum(-1)  # (…, n)
    parts = (words[..., None] >> torch.arange(0, 8 * bits, 8, device=codes.device)) & 255  # (…, n, bits)
    return parts.to(torch.uint8).flatten(-2)[..., : -(-d * bits // 8)]


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes, and behind them what filled the last byte up."""
    if torch.compiler.is_exporting():
        packed = packed.int()  # the ONNX exporter makes int8 of a shifted uint8, and onnxruntime refuses a mix of both
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    if bits == 2:
        return torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    parts = F.pad(packed, (0, -packed.shape[-1] % 3)).unflatten(-1, (-1, 3)).int()  # (…, n, 3)
    words = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16)  # (…, n)
    return torch.stack([((words >> shift) & 7).to(torch.uint8) for shift in range(0, 24, 3)], -1).flatten(-2)


def rounded(x: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """(…, d) as it comes back from so many bits; to gradients it is x itself."""
    return x if bits == 32 else _Rounded.apply(x, bits, group)  # pyright: ignore[reportReturnType]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int, group: int) -> Tensor:
        return from_codes(*to_codes(x, bits, group), bits, x.shape[-1], x.dtype, group)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return slope, None, None
