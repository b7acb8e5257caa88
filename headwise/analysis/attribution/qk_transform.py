"""What stands between W_Q x and a score: a norm of queries and keys, the turning of rotary positions, a factor.

Nothing here knows an architecture. One call shows what went in and what came out for every head and token; positions turn
each pair of channels alike in all queries and keys of a token, so the turning follows from the numbers, and is checked on
them. What does not fit is refused, so that no share is ever wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.kernels.precision import rounding_bound
from headwise.model import Norm

CLOSE = 1e-4  # relative; of numbers that the model computed in float32 or float64
# Roundings between what a layer reads and its scores: projection, norm (3), cos or sin, two products, their sum.
ROUNDINGS = 8
WORSE = 4.0  # times the residual of the best form: a simpler form that fits so well is taken
NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))


@dataclass(frozen=True, eq=False)
class Frozen:
    """A norm of queries, or of keys, at the scales it had: its gain by head, its scale by head and token."""

    gain: Tensor  # (H, 1, d)
    scale: Tensor  # (H or 1, T, 1)

    def at(self, head: int) -> Tensor:
        """What one head's channels are multiplied by: (T, d)."""
        return self.gain[head] * self.scale[head if len(self.scale) > 1 else 0]


@dataclass(frozen=True, eq=False)
class Turning:
    """Linear, at the scales of one call: from projected queries and keys to those that meet in scores."""

    factor: dict[str, float] = field(default_factory=lambda: {"q": 1.0, "k": 1.0})
    norms: dict[str, Frozen] = field(default_factory=dict)
    layout: str = "none"  # which channels are turned together: none, half, interleaved
    cos: Tensor | None = None  # (T, dims/2)
    sin: Tensor | None = None

    def turn(self, letter: str, head: int, x: Tensor, positions: list[int]) -> Tensor:
        """Parts of one head's queries or keys at some positions: (…, n, d) → (…, n, d)"""
        x = x * self.factor[letter]
        if letter in self.norms:
            x = x * self.norms[letter].at(head)[positions]
        if self.cos is None or self.sin is None:
            return x
        return _turned(x, self.cos[positions], self.sin[positions], self.layout)


def find_turning(layer: Any, projected: dict[str, Tensor], met: dict[str, Tensor], dtype: torch.dtype) -> Turning:
    """Find how one call got from projections to the vectors that met in scores: (H, T, d) by letter, q and k.

    `dtype` is the model's, in which `met` was computed. In half precision a rotation can be smaller than the tolerance, so
    all forms are compared: the simplest one that fits about as well as the best is taken.
    """
    fits: list[tuple[float, Turning]] = []
    bound = rounding_bound(dtype, ROUNDINGS)
    for turning, reached in _forms(layer, projected, met):
        residual = max(_residual(reached[letter], met[letter]) for letter in "qk")
        if residual <= CLOSE:
            return turning
        if residual <= bound:
            fits.append((residual, turning))
    if fits:
        best = min(residual for residual, _ in fits)
        return next(turning for residual, turning in fits if residual <= WORSE * best)
    raise HeadwiseError(
        f"between W_Q, W_K and the scores of layer {layer.site.address} stands something other than a norm, rotary positions "
        f"and a factor, so its scores cannot be shared out."
    )


def _forms(
    layer: Any, projected: dict[str, Tensor], met: dict[str, Tensor]
) -> Iterator[tuple[Turning, dict[str, Tensor]]]:
    """Every form that is known, the simplest first, and the queries and keys it leads to."""
    factor = {letter: _factor(projected[letter], met[letter]) for letter in "qk"}
    yield Turning(factor=factor), {letter: x * factor[letter] for letter, x in projected.items()}
    for norms in ({}, *_norms(layer, projected)):
        normed = {
            letter: x * norms[letter].gain * norms[letter].scale if letter in norms else x
            for letter, x in projected.items()
        }
        yield Turning(norms=norms), normed
        for layout, cos, sin in _rotary(normed, met):
            turned = {letter: _turned(x, cos, sin, layout) for letter, x in normed.items()}
            yield Turning(norms=norms, layout=layout, cos=cos, sin=sin), turned


def _norms(layer: Any, projected: dict[str, Tensor]) -> list[dict[str, Frozen]]:
    """Norms of queries and keys that the layer has, over each head's channels or over all of them."""
    module = getattr(layer, "module", layer)
    for names in NORMS:
        parts = {letter: getattr(module, name, None) for letter, name in zip("qk", names, strict=True)}
        if all(isinstance(part, torch.nn.Module) for part in parts.values()):
            made = {letter: _frozen(part, projected[letter]) for letter, part in parts.items()}
            return [made] if all(made.values()) else []  # pyright: ignore[reportReturnType]
    return []


def _frozen(part: Any, x: Tensor) -> Frozen | None:
    """A norm at the scales that (H, T, d) sets; None where it is none, or adds a bias or takes a mean out."""
    H, _, d = x.shape
    for width, rows in ((d, x), (H * d, x.transpose(0, 1).flatten(1)[None])):
        norm = Norm.tried(part, width)
        if norm is not None and not norm.centred and norm.bias is None:
            gain = norm.gain.expand(width).reshape(-1, 1, d).expand(H, 1, d)
            return Frozen(gain.double(), norm.scale(rows))
    return None


def _rotary(normed: dict[str, Tensor], met: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each layout with the angles that fit it best: one complex number for each pair of channels and token, of all heads."""
    before = torch.cat((normed["q"], normed["k"]))  # (H + K, T, d)
    after = torch.cat((met["q"], met["k"]))
    for dims in range(before.shape[-1] // 2 * 2, 0, -2):
        for layout in ("half", "interleaved"):
            (a, b), (c, d) = _pairs(before[..., :dims], layout), _pairs(after[..., :dims], layout)  # (H + K, T, dims/2)
            size = (a.square() + b.square()).sum(0).clamp(min=torch.finfo(a.dtype).tiny)
            yield layout, (a * c + b * d).sum(0) / size, (a * d - b * c).sum(0) / size  # (T, dims/2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """(…, T, d); channels behind the turned ones pass through."""
    dims = 2 * cos.shape[-1]
    one, other = _pairs(x[..., :dims], layout)
    turned = one * cos - other * sin, other * cos + one * sin
    made = torch.cat(turned, -1) if layout == "half" else torch.stack(turned, -1).flatten(-2)
    return torch.cat((made, x[..., dims:]), -1)


def _pairs(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    if layout == "half":
        one, other = x.chunk(2, -1)
        return one, other
    return x[..., 0::2], x[..., 1::2]


def _factor(before: Tensor, after: Tensor) -> float:
    return float((before * after).sum() / before.square().sum().clamp(min=1e-300))


def _residual(x: Tensor, wanted: Tensor) -> float:
    """The largest difference relative to the largest value."""
    return float((x - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))
