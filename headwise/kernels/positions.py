"""Where a token stands: sinusoids to add, rotary angles to turn by, ALiBi's slopes. (Learned positions are a table.)"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.spec import Rotary


def sinusoidal(positions: Tensor, width: int) -> Tensor:
    """The fixed table of Vaswani et al. 2017: sines on even channels, cosines on odd. (…, T) → (…, T, width)

    >>> sinusoidal(torch.tensor([0]), 4)
    tensor([[0., 1., 0., 1.]])
    """
    steps = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64)
    angles = positions.double()[..., None] * 10000.0 ** (-steps / width)  # (…, T, ⌈width/2⌉)
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., :width].float()


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Rotary angles of a run of positions: made once, used by every layer.

    A pair of channels (a, b) becomes (a cos − b sin, b cos + a sin). `cos` holds each cosine twice, `sin` each sine with a
    minus and without, where the channels stand, (1 or B, 1, T, dims): so turning is two products and a sum.
    """

    cos: Tensor
    sin: Tensor
    layout: str

    @staticmethod
    def at(positions: Tensor, rotary: Rotary, head_dim: int, dtype: torch.dtype | None = None) -> "RotaryTable":
        """The angles at these positions, (T,) or (B, T)."""
        positions = positions if positions.ndim == 2 else positions[None]
        frequencies = rotary_frequencies(rotary, head_dim, positions.device)  # (dims/2,)
        angles = positions[:, None, :, None].float() * frequencies  # (B, 1, T, dims/2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        if rotary.layout == "half":
            return RotaryTable(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), rotary.layout)
        pairs = torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)  # (B, 1, T, dims/2, 2)
        return RotaryTable(pairs[0].flatten(-2), pairs[1].flatten(-2), rotary.layout)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys, (B, H, T, d); channels beyond dims pass through."""
        dims = self.cos.shape[-1]
        if dims < x.shape[-1]:
            return torch.cat((self.rotate(x[..., :dims]), x[..., dims:]), -1)
        half = self.layout == "half"
        partners = x.roll(dims // 2, -1) if half else x.reshape(*x.shape[:-1], dims // 2, 2).flip(-1).flatten(-2)
        return x * self.cos + partners * self.sin


def rotary_frequencies(rotary: Rotary, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """How fast each pair of channels turns, in radians a position. (dims/2,)"""
    dims = rotary.dims or head_dim
    frequencies = 1.0 / rotary.theta ** (torch.arange(0, dims, 2, device=device).float() / dims)
    scaling = rotary.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3: waves longer than the old context divided by low are slowed, those shorter than it divided by high are kept.
    rotations = scaling.original_context * frequencies / (2 * math.pi)
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def alibi_slopes(heads: int) -> Tensor:
    """The slope of each head (https://arxiv.org/abs/2108.12409): a geometric series, interleaved off powers of two.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if heads < 1:
        raise HeadwiseError(f"ALiBi needs at least one head, got {heads}.")
    power = 2 ** math.floor(math.log2(heads))
    base_slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    extra_slopes = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
    return torch.tensor(base_slopes + extra_slopes[: heads - power])
