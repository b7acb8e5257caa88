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
from headwise.kernels.rounding_tolerance import rounding_bound
from headwise.model import LinearizedNorm

TOLERANCE = 1e-4  # relative; of numbers that the model computed in float32 or float64
# Roundings between what a layer reads and its scores: projection, norm (3), cos or sin, two products, their sum.
ROUNDINGS = 8
WORSE = 4.0  # times the residual of the best form: a simpler form that fits so well is taken
QK_NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))


@dataclass(frozen=True, eq=False)
class FrozenQKNorm:
    """A norm of queries, or of keys, at the scales it had: its gain by head, its scale by head and token."""

    gain: Tensor  # (H, 1, d)
    scale: Tensor  # (H or 1, T, 1)

    def multiplier(self, head: int) -> Tensor:
        """What one head's channels are multiplied by: (T, d)."""
        return self.gain[head] * self.scale[head if len(self.scale) > 1 else 0]


@dataclass(frozen=True, eq=False)
class QKNormRotaryTransform:
    """Linear, at the scales of one call: from projected queries and keys to those that meet in scores."""

    factor: dict[str, float] = field(default_factory=lambda: {"q": 1.0, "k": 1.0})
    norms: dict[str, FrozenQKNorm] = field(default_factory=dict)
    layout: str = "none"  # which channels are turned together: none, half, interleaved
    cos: Tensor | None = None  # (T, dims/2)
    sin: Tensor | None = None

    def apply(self, projection: str, head: int, x: Tensor, positions: list[int]) -> Tensor:
        """Parts of one head's queries or keys at some positions: (…, n, d) → (…, n, d)"""
        x = x * self.factor[projection]
        if projection in self.norms:
            x = x * self.norms[projection].multiplier(head)[positions]
        if self.cos is None or self.sin is None:
            return x
        return _rotate(x, self.cos[positions], self.sin[positions], self.layout)


def infer_qk_transform(
    layer: Any, projected: dict[str, Tensor], score_inputs: dict[str, Tensor], dtype: torch.dtype
) -> QKNormRotaryTransform:
    """Find how one call got from projections to the vectors that met in scores: (H, T, d) by projection, q and k.

    `dtype` is the model's, in which `score_inputs` were computed. In half precision a rotation can be smaller than the
    tolerance, so all forms are compared: the simplest one that fits about as well as the best is taken.
    """
    fits: list[tuple[float, QKNormRotaryTransform]] = []
    bound = rounding_bound(dtype, ROUNDINGS)
    for transform, outputs in _forms(layer, projected, score_inputs):
        residual = max(_residual(outputs[projection], score_inputs[projection]) for projection in "qk")
        if residual <= TOLERANCE:
            return transform
        if residual <= bound:
            fits.append((residual, transform))
    if fits:
        best = min(residual for residual, _ in fits)
        return next(transform for residual, transform in fits if residual <= WORSE * best)
    raise HeadwiseError(
        f"between W_Q, W_K and the scores of layer {layer.hook_point.address} stands something other than a norm, "
        f"rotary positions "
        f"and a factor, so its scores cannot be shared out."
    )


def _forms(
    layer: Any, projected: dict[str, Tensor], score_inputs: dict[str, Tensor]
) -> Iterator[tuple[QKNormRotaryTransform, dict[str, Tensor]]]:
    """Every form that is known, the simplest first, and the queries and keys it leads to."""
    factor = {projection: _fit_factor(projected[projection], score_inputs[projection]) for projection in "qk"}
    yield (
        QKNormRotaryTransform(factor=factor),
        {projection: x * factor[projection] for projection, x in projected.items()},
    )
    for norms in ({}, *_frozen_qk_norms(layer, projected)):
        normed = {
            projection: x * norms[projection].gain * norms[projection].scale if projection in norms else x
            for projection, x in projected.items()
        }
        yield QKNormRotaryTransform(norms=norms), normed
        for layout, cos, sin in _infer_rotary(normed, score_inputs):
            rotated = {projection: _rotate(x, cos, sin, layout) for projection, x in normed.items()}
            yield QKNormRotaryTransform(norms=norms, layout=layout, cos=cos, sin=sin), rotated


def _frozen_qk_norms(layer: Any, projected: dict[str, Tensor]) -> list[dict[str, FrozenQKNorm]]:
    """Norms of queries and keys that the layer has, over each head's channels or over all of them."""
    module = getattr(layer, "module", layer)
    for names in QK_NORM_NAMES:
        modules = {projection: getattr(module, name, None) for projection, name in zip("qk", names, strict=True)}
        if all(isinstance(norm_module, torch.nn.Module) for norm_module in modules.values()):
            frozen = {
                projection: _freeze_norm(norm_module, projected[projection])
                for projection, norm_module in modules.items()
            }
            return [frozen] if all(frozen.values()) else []  # pyright: ignore[reportReturnType]
    return []


def _freeze_norm(norm_module: Any, x: Tensor) -> FrozenQKNorm | None:
    """A norm at the scales that (H, T, d) sets; None where it is none, or adds a bias or takes a mean out."""
    H, _, d = x.shape
    for width, rows in ((d, x), (H * d, x.transpose(0, 1).flatten(1)[None])):
        norm = LinearizedNorm.infer(norm_module, width)
        if norm is not None and not norm.centered and norm.bias is None:
            gain = norm.gain.expand(width).reshape(-1, 1, d).expand(H, 1, d)
            return FrozenQKNorm(gain.double(), norm.scale(rows))
    return None


def _infer_rotary(normed: dict[str, Tensor], score_inputs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each layout with the angles that fit it best: one complex number for each pair of channels and token, of all heads."""
    before = torch.cat((normed["q"], normed["k"]))  # (H + K, T, d)
    after = torch.cat((score_inputs["q"], score_inputs["k"]))
    for dims in range(before.shape[-1] // 2 * 2, 0, -2):
        for layout in ("half", "interleaved"):
            (a, b), (c, d) = _pairs(before[..., :dims], layout), _pairs(after[..., :dims], layout)  # (H + K, T, dims/2)
            size = (a.square() + b.square()).sum(0).clamp(min=torch.finfo(a.dtype).tiny)
            yield layout, (a * c + b * d).sum(0) / size, (a * d - b * c).sum(0) / size  # (T, dims/2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """(…, T, d); channels behind the turned ones pass through."""
    dims = 2 * cos.shape[-1]
    first, second = _pairs(x[..., :dims], layout)
    rotated = first * cos - second * sin, second * cos + first * sin
    joined = torch.cat(rotated, -1) if layout == "half" else torch.stack(rotated, -1).flatten(-2)
    return torch.cat((joined, x[..., dims:]), -1)


def _pairs(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    if layout == "half":
        first, second = x.chunk(2, -1)
        return first, second
    return x[..., 0::2], x[..., 1::2]


def _fit_factor(before: Tensor, after: Tensor) -> float:
    return float((before * after).sum() / before.square().sum().clamp(min=1e-300))


def _residual(x: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest value."""
    return float((x - expected).abs().max() / expected.abs().max().clamp(min=1e-300))
