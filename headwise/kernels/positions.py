"""Position encodings without learned weights: sinusoidal embeddings, rotary angles and ALiBi slopes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.kernels.rounding_tolerance import to_float64
from headwise.spec import Rotary


def sinusoidal(positions: Tensor, width: int) -> Tensor:
    """Return sinusoidal embeddings (Vaswani et al. 2017), sines in even and cosines in odd channels: (…, T) → (…, T, width).

    >>> sinusoidal(torch.tensor([0]), 4)
    tensor([[0., 1., 0., 1.]])
    """
    wide = to_float64(positions)
    steps = torch.arange(0, width, 2, device=wide.device, dtype=torch.float64)
    angles = wide[..., None] * 10000.0 ** (-steps / width)  # (…, T, ⌈width/2⌉)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., :width].float().to(positions.device)


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Cosines and sines of the rotary angles of some positions, computed once and shared by all layers.

    A pair of channels (a, b) is rotated to (a cos − b sin, b cos + a sin). The tables repeat each value at both channels of
    a pair, so that a rotation is x * cos + partner * sin.

    Attributes:
        cos: Cosine of each channel, (1 or B, 1, T, dims).
        sin: Sine of each channel, negated for the first channel of a pair, (1 or B, 1, T, dims).
        layout: "half" or "interleaved", as in `Rotary`.
    """

    cos: Tensor
    sin: Tensor
    layout: str

    @staticmethod
    def at(positions: Tensor, rotary: Rotary, head_dim: int, dtype: torch.dtype | None = None) -> "RotaryTable":
        """Compute the angles at these positions, (T,) or (B, T)."""
        positions = positions if positions.ndim == 2 else positions[None]
        frequencies = rotary_frequencies(rotary, head_dim, positions.device)  # (dims/2,)
        angles = positions[:, None, :, None].float() * frequencies  # (B, 1, T, dims/2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        if rotary.layout == "half":
            return RotaryTable(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), rotary.layout)
        pairs = torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)  # (B, 1, T, dims/2, 2)
        return RotaryTable(pairs[0].flatten(-2), pairs[1].flatten(-2), rotary.layout)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys, (B, H, T, d). Channels after the first `dims` stay unchanged."""
        dims = self.cos.shape[-1]
        if dims < x.shape[-1]:
            return torch.cat((self.rotate(x[..., :dims]), x[..., dims:]), -1)
        half = self.layout == "half"
        partners = x.roll(dims // 2, -1) if half else x.reshape(*x.shape[:-1], dims // 2, 2).flip(-1).flatten(-2)
        return x * self.cos + partners * self.sin


def rotary_frequencies(rotary: Rotary, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the angular frequency of each pair of channels in radians per position, (dims/2,)."""
    dims = rotary.dims or head_dim
    frequencies = 1.0 / rotary.theta ** (torch.arange(0, dims, 2, device=device).float() / dims)
    scaling = rotary.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3: wavelengths above original_context / low_freq_factor are scaled, those below original_context /
    # high_freq_factor stay, and those in between are interpolated.
    rotations = scaling.original_context * frequencies / (2 * math.pi)
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def alibi_slopes(heads: int) -> Tensor:
    """Return the ALiBi slope of each head, a geometric series (https://arxiv.org/abs/2108.12409).

    If the number of heads is not a power of two, the remaining slopes come from the series of twice the number of heads.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if heads < 1:
        raise ArgumentError(f"heads={heads}: ALiBi needs at least one head.")
    power = 2 ** math.floor(math.log2(heads))
    base_slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    extra_slopes = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return torch.tensor(base_slopes + extra_slopes[: heads - power])
