"""Position encodings without learned weights: sinusoidal embeddings, rotary angles and ALiBi slopes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import ArgumentError
from headwise.kernels.rounding_tolerance import to_float64
from headwise.spec import QueryScaling, Rotary


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
    """Cosines and sines of the rotary angles of some positions, computed once and shared by layers.

    A pair of channels (a, b) is rotated to (a cos − b sin, b cos + a sin). The tables repeat each value at both channels of
    a pair, so that a rotation is x * cos + partner * sin.

    Attributes:
        cos: Cosine of each channel, (1 or B, 1, T, dims). No channels in a layer without rotary embedding.
        sin: Sine of each channel, negated for the first channel of a pair, (1 or B, 1, T, dims).
        layout: "half" or "interleaved", as in `Rotary`.
        query_factor: Factor of the queries by position, (1 or B, 1, T, 1), or None.
    """

    cos: Tensor
    sin: Tensor
    layout: str
    query_factor: Tensor | None = None

    @staticmethod
    def at(
        positions: Tensor,
        rotary: Rotary | None,
        head_dim: int,
        dtype: torch.dtype | None = None,
        query_scaling: QueryScaling | None = None,
    ) -> "RotaryTable":
        """Compute the angles at these positions, (T,) or (B, T)."""
        positions = positions if positions.ndim == 2 else positions[None]
        query_factor = None if query_scaling is None else query_factors(positions, query_scaling)[:, None, :, None]
        query_factor = None if query_factor is None else query_factor.to(dtype)
        if rotary is None:
            empty = positions.new_empty((len(positions), 1, positions.shape[1], 0), dtype=dtype or torch.float32)
            return RotaryTable(empty, empty, "half", query_factor)
        scaling = rotary.scaling
        length = int(positions.max()) + 1 if scaling is not None and scaling.depends_on_length else None
        frequencies = rotary_frequencies(rotary, head_dim, positions.device, length)  # (dims/2,)
        angles = positions[:, None, :, None].float() * frequencies  # (B, 1, T, dims/2)
        cos, sin = angles.cos(), angles.sin()
        if scaling is not None and scaling.cos_sin_factor != 1.0:
            cos, sin = cos * scaling.cos_sin_factor, sin * scaling.cos_sin_factor
        cos, sin = cos.to(dtype), sin.to(dtype)
        if rotary.layout == "half":
            return RotaryTable(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), rotary.layout, query_factor)
        pairs = torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)  # (B, 1, T, dims/2, 2)
        return RotaryTable(pairs[0].flatten(-2), pairs[1].flatten(-2), rotary.layout, query_factor)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys, (B, H, T, d). Channels after the first `dims` stay unchanged."""
        dims = self.cos.shape[-1]
        if dims < x.shape[-1]:
            return torch.cat((self.rotate(x[..., :dims]), x[..., dims:]), -1) if dims else x
        half = self.layout == "half"
        partners = x.roll(dims // 2, -1) if half else x.reshape(*x.shape[:-1], dims // 2, 2).flip(-1).flatten(-2)
        return x * self.cos + partners * self.sin

    def scale_queries(self, q: Tensor) -> Tensor:
        """Multiply queries by the factors of their positions, if there are any: (B, H, T, d) → (B, H, T, d)."""
        return q if self.query_factor is None else q * self.query_factor

    def repeat_batch(self, copies: int) -> "RotaryTable":
        """Return the table of `copies` copies of the batch."""
        factor = self.query_factor
        if len(self.cos) > 1:
            cos, sin = (x.repeat(copies, 1, 1, 1) for x in (self.cos, self.sin))
            return RotaryTable(cos, sin, self.layout, None if factor is None else factor.repeat(copies, 1, 1, 1))
        return self


def query_factors(positions: Tensor, scaling: QueryScaling) -> Tensor:
    """Return the factor of the queries at each position, in float32: (…, T) → (…, T).

    >>> query_factors(torch.tensor([0, 7, 8]), QueryScaling(beta=1.0, context=8))
    tensor([1.0000, 1.0000, 1.6931])
    """
    return 1 + scaling.beta * torch.log1p(torch.floor((positions.float() + scaling.offset) / scaling.context))


def rotary_frequencies(
    rotary: Rotary, head_dim: int, device: torch.device | str = "cpu", length: int | None = None
) -> Tensor:
    """Return the angular frequency of each pair of channels in radians per position, (dims/2,).

    Args:
        rotary: Rotary embedding.
        head_dim: Channels per head.
        device: Device of the result.
        length: Number of tokens of the text, for the kinds of scaling that depend on it. None means a short text.
    """
    dims, scaling, theta = rotary.dims or head_dim, rotary.scaling, rotary.theta
    exponents = torch.arange(0, dims, 2, device=device).float() / dims
    if scaling is not None and scaling.kind == "dynamic":
        ratio = max(length or 0, scaling.original_context) / scaling.original_context
        theta *= (scaling.factor * ratio - (scaling.factor - 1)) ** (dims / (dims - 2))
    wavelengths = theta**exponents  # divided by 2π
    if scaling is None or scaling.kind == "dynamic":
        return 1.0 / wavelengths
    if scaling.kind == "linear":
        return 1.0 / wavelengths / scaling.factor
    if scaling.kind == "longrope":
        is_long = (length or 0) > scaling.original_context
        return 1.0 / (
            torch.tensor(scaling.long_factors if is_long else scaling.short_factors, device=device, dtype=torch.float32)
            * wavelengths
        )
    if scaling.kind == "yarn":
        ramp = yarn_ramp(rotary, dims).to(device)
        return (1 - ramp) / (scaling.factor * wavelengths) + ramp / wavelengths
    # Llama 3: wavelengths above original_context / low_freq_factor are scaled, those below original_context /
    # high_freq_factor stay, and those in between are interpolated.
    frequencies = 1.0 / wavelengths
    rotations = scaling.original_context * frequencies / (2 * math.pi)
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def yarn_ramp(rotary: Rotary, dims: int) -> Tensor:
    """Return YaRN's share of the original frequency for each pair of channels: 1 keeps it, 0 divides it, (dims/2,)."""
    scaling = rotary.scaling
    assert scaling is not None
    # the pair of channels that rotates this often over the original context, as a real number
    low, high = (
        dims * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rotary.theta))
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    high = high + 0.001 if low == high else high
    return 1 - ((torch.arange(dims // 2).float() - low) / (high - low)).clamp(0, 1)


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
    return torch.tensor(base_slopes + extra_slopes[: heads - power], dtype=torch.float32)
