"""Numbers at few bits: symmetric, in groups of channels, each with a scale of its own.

Within a group s = max|x| / (2^(b−1) − 1) and x becomes s · round(x / s). A row of 64 channels at 8 bits takes 64 bytes and
two scales of 4; at 4 bits two numbers share a byte, at 3 eight share three, at 2 four share one. What is kept as the scale is
max|x| itself: so the largest number of a group comes back bitwise, and what was rounded once is rounded to itself.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.spec.weight_bits import GROUP_SIZE


def quantize(x: Tensor, bits: int, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    """Quantize (…, d). Return packed integer codes, (…, bytes or channels), and scales, (…, groups).

    >>> codes, scales = quantize(torch.tensor([[-7.0, 3.0, 0.0, 2.0]]), 4)
    >>> dequantize(codes, scales, 4, 4, torch.float32)
    tensor([[-7.,  3.,  0.,  2.]])
    """
    d, max_code = x.shape[-1], 2 ** (bits - 1) - 1
    block_size = max(1, min(group_size, d))
    blocks = F.pad(x.detach().float(), (0, -d % block_size)).unflatten(-1, (-1, block_size))  # (…, groups, size)
    scales = blocks.abs().amax(-1)
    step_sizes = torch.where(scales > 0, scales / max_code, 1.0)
    quantized = (blocks / step_sizes[..., None]).round_().clamp_(-max_code, max_code).flatten(-2)[..., :d]  # (…, d)
    if bits > 8:
        return quantized.to(torch.int16), scales
    quantized = quantized.to(torch.int8)
    if bits == 8:
        return quantized, scales
    return _pack((quantized + (max_code + 1)).to(torch.uint8), bits), scales  # codes start at 1


def dequantize(
    quantized: Tensor, scales: Tensor, bits: int, d: int, dtype: torch.dtype, group_size: int = GROUP_SIZE
) -> Tensor:
    """Return the dequantized numbers, (…, d)."""
    max_code = 2 ** (bits - 1) - 1
    if bits < 8:
        quantized = _unpack(quantized, bits)[..., :d].to(torch.int8) - (max_code + 1)
    block_size, normalized = max(1, min(group_size, d)), quantized.float() / max_code  # −1 to 1
    if d % block_size:
        return (normalized * scales.repeat_interleave(block_size, -1)[..., :d]).to(dtype)
    return (normalized.unflatten(-1, (-1, block_size)) * scales[..., None]).flatten(-2).to(dtype)


def _pack(quantized: Tensor, bits: int) -> Tensor:
    """Pack codes below 2^bits into bytes, the first code in the lowest bits: (…, d) → (…, ⌈d·bits/8⌉)."""
    d = quantized.shape[-1]
    if bits == 4:
        nibbles = F.pad(quantized, (0, d % 2)).unflatten(-1, (-1, 2))
        return nibbles[..., 0] | (nibbles[..., 1] << 4)
    octets = F.pad(quantized, (0, -d % 8)).unflatten(-1, (-1, 8)).int()  # (…, n, 8)
    words = (octets << torch.arange(0, 8 * bits, bits, device=quantized.device)).sum(-1)  # (…, n)
    byte_values = (words[..., None] >> torch.arange(0, 8 * bits, 8, device=quantized.device)) & 255  # (…, n, bits)
    return byte_values.to(torch.uint8).flatten(-2)[..., : -(-d * bits // 8)]


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes, followed by the padding of the last byte."""
    if torch.compiler.is_exporting():
        packed = packed.int()  # the ONNX exporter converts shifted uint8 to int8, and onnxruntime cannot mix both
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    if bits == 2:
        return torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    byte_values = F.pad(packed, (0, -packed.shape[-1] % 3)).unflatten(-1, (-1, 3)).int()  # (…, n, 3)
    words = byte_values[..., 0] | (byte_values[..., 1] << 8) | (byte_values[..., 2] << 16)  # (…, n)
    return torch.stack([((words >> shift) & 7).to(torch.uint8) for shift in range(0, 24, 3)], -1).flatten(-2)


def fake_quantize(x: Tensor, bits: int, group_size: int = GROUP_SIZE) -> Tensor:
    """Quantize and dequantize (…, d). Gradients pass through unchanged (straight-through estimator)."""
    return x if bits == 32 else _FakeQuantize.apply(x, bits, group_size)  # pyright: ignore[reportReturnType]


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int, group_size: int) -> Tensor:
        return dequantize(*quantize(x, bits, group_size), bits, x.shape[-1], x.dtype, group_size)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_output, None, None
