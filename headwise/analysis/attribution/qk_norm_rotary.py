"""Infer the transform between W_Q x, W_K x and the attention scores: QK norm, rotary embedding and a scale factor.

The transform is inferred from one call, without knowledge of the architecture. Rotary embeddings rotate each pair of
channels by the same angle in all queries and keys of a token, so the angles follow from the inputs and outputs, and are
verified on them. A call that fits no known form raises an error, so attributions are never silently wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.errors import UnsupportedModelError
from headwise.heads import MultiHeadAttention
from headwise.kernels import RotaryTable
from headwise.kernels.rounding_tolerance import rounding_bound, to_float64
from headwise.model import LinearizedNorm

TOLERANCE = 1e-4  # relative, for values computed in float32 or float64
# Roundings between the input of a layer and its scores: projection, norm (3), cos or sin, two products, their sum.
ROUNDINGS = 8
WORSE = 4.0  # a simpler form is chosen if its residual is at most this factor above the best residual
QK_NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))


@dataclass(frozen=True, eq=False)
class FrozenQKNorm:
    """QK norm with frozen scales.

    Attributes:
        gain: Gain of each head, (H, 1, d).
        scale: Scale of each head and token, (H or 1, T, 1).
    """

    gain: Tensor
    scale: Tensor

    def multiplier(self, head: int) -> Tensor:
        """Return the factor on the channels of one head, (T, d)."""
        return self.gain[head] * self.scale[head if len(self.scale) > 1 else 0]


@dataclass(frozen=True, eq=False)
class QKNormRotaryTransform:
    """Linear map from projected queries and keys to those in the scores, with the norm scales of one call.

    Attributes:
        factor: Scale factor of queries and keys, by "q" and "k".
        norms: Frozen norms, by "q" and "k".
        layout: Channel pairs of the rotary embedding: "none", "half" or "interleaved".
        cos: Cosines of the rotary angles, (T, dims/2).
        sin: Sines of the rotary angles, (T, dims/2).
        norms_last: Whether the norms follow the rotation.
        query_factor: Factor of the queries by position, (T, 1), or None.
    """

    factor: dict[str, float] = field(default_factory=lambda: {"q": 1.0, "k": 1.0})
    norms: dict[str, FrozenQKNorm] = field(default_factory=dict)
    layout: str = "none"
    cos: Tensor | None = None
    sin: Tensor | None = None
    norms_last: bool = False
    query_factor: Tensor | None = None

    def apply(self, projection: str, head: int, x: Tensor, positions: list[int]) -> Tensor:
        """Transform parts of one head's queries or keys at some positions: (…, n, d) → (…, n, d)."""
        x = x * self.factor[projection]
        norm = self.norms[projection].multiplier(head)[positions] if projection in self.norms else 1.0
        x = x if self.norms_last else x * norm
        if self.cos is not None and self.sin is not None:
            x = _rotate(x, self.cos[positions], self.sin[positions], self.layout)
        x = x * norm if self.norms_last else x
        return x if self.query_factor is None or projection == "k" else x * self.query_factor[positions]


def infer_qk_transform(
    layer: Any, projected: dict[str, Tensor], score_inputs: dict[str, Tensor], dtype: torch.dtype
) -> QKNormRotaryTransform:
    """Infer the transform from projections to the queries and keys of the scores.

    In half precision a rotation can be smaller than the tolerance, so all forms are compared, and the simplest form that
    fits about as well as the best one is returned.

    Args:
        layer: The attention layer.
        projected: Projected queries and keys, (H, T, d), by "q" and "k".
        score_inputs: Queries and keys of the scores, (H, T, d), by "q" and "k".
        dtype: Dtype in which the model computed `score_inputs`.
    """
    fits: list[tuple[float, QKNormRotaryTransform]] = []
    bound = rounding_bound(dtype, ROUNDINGS)
    for transform, outputs in _candidate_transforms(layer, projected, score_inputs):
        residual = max(_residual(outputs[projection], score_inputs[projection]) for projection in "qk")
        if residual <= TOLERANCE:
            return transform
        if residual <= bound:
            fits.append((residual, transform))
    if fits:
        best = min(residual for residual, _ in fits)
        return next(transform for residual, transform in fits if residual <= WORSE * best)
    raise UnsupportedModelError(
        f"layer {layer.hook_point.address}: scores cannot be attributed, because the transform between W_Q, W_K and the "
        f"scores is not a combination of QK norm, rotary embedding and scale factor. Choose a head of another layer."
    )


def native_qk_transform(
    layer: MultiHeadAttention, projected: dict[str, Tensor], inputs: Tensor
) -> QKNormRotaryTransform:
    """Return the transform of a native layer for a text without padding, which is known from its spec.

    Args:
        layer: The attention layer.
        projected: Projected queries and keys, (H, T, d), by "q" and "k".
        inputs: Input of the layer, (T, D).
    """
    spec, (_, T, d) = layer.spec, projected["q"].shape
    norms: dict[str, FrozenQKNorm] = {}
    positions = torch.arange(T, device=inputs.device)
    table = RotaryTable.at(positions, spec.rotary, d, inputs.dtype, spec.query_scaling)
    for projection, norm in (("q", layer.q_norm), ("k", layer.k_norm)):
        if norm is None:
            continue
        if norm.norm.kind == "layer" or norm.norm.bias:
            raise UnsupportedModelError(
                f"layer {layer.hook_point.address}: scores cannot be attributed, because its queries and keys pass through a "
                f"LayerNorm. Only RMS norms without bias are supported. Choose a head of another model."
            )
        x = projected[projection]  # the scale is that of the projections: a rotation keeps the length
        gain = x.new_ones(d) if norm.gain is None else to_float64(norm.gain)
        scale = to_float64(norm.double_statistics(x[None], inputs[None])[0])  # (H or 1, T, 1)
        norms[projection] = FrozenQKNorm(gain.expand(len(x), d)[:, None], scale)
    cos, sin = (to_float64(tensor[0, 0]) for tensor in (table.cos, table.sin))  # (T, dims)
    step = cos.shape[-1] // 2
    is_half, query_factor = table.layout == "half", table.query_factor
    cos, sin = (cos[:, :step], -sin[:, :step]) if is_half else (cos[:, ::2], -sin[:, ::2])
    return QKNormRotaryTransform(
        norms=norms,
        layout=table.layout if step else "none",
        cos=cos if step else None,
        sin=sin if step else None,
        norms_last=spec.qk_norm is not None and spec.qk_norm.after_rotary,
        query_factor=None if query_factor is None else to_float64(query_factor[0, 0]),
    )


def _candidate_transforms(
    layer: Any, projected: dict[str, Tensor], score_inputs: dict[str, Tensor]
) -> Iterator[tuple[QKNormRotaryTransform, dict[str, Tensor]]]:
    """Yield every known form, simplest first, with its queries and keys."""
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
    """Return the QK norms of the layer, over each head's channels or over all channels."""
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
    """Freeze a norm at the scales of x (H, T, d). None if it is not a norm, has a bias or subtracts the mean."""
    H, _, d = x.shape
    for width, rows in ((d, x), (H * d, x.transpose(0, 1).flatten(1)[None])):
        norm = LinearizedNorm.infer(norm_module, width)
        if norm is not None and not norm.centered and norm.bias is None:
            gain = norm.gain.expand(width).reshape(-1, 1, d).expand(H, 1, d)
            return FrozenQKNorm(to_float64(gain), norm.scale(rows))
    return None


def _infer_rotary(normed: dict[str, Tensor], score_inputs: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each layout with its best-fitting angles: one complex factor per channel pair and token, for all heads."""
    before = torch.cat((normed["q"], normed["k"]))  # (H + K, T, d)
    after = torch.cat((score_inputs["q"], score_inputs["k"]))
    for dims in range(before.shape[-1] // 2 * 2, 0, -2):
        for layout in ("half", "interleaved"):
            (a, b), (c, d) = _pairs(before[..., :dims], layout), _pairs(after[..., :dims], layout)  # (H + K, T, dims/2)
            size = (a.square() + b.square()).sum(0).clamp(min=torch.finfo(a.dtype).tiny)
            yield layout, (a * c + b * d).sum(0) / size, (a * d - b * c).sum(0) / size  # (T, dims/2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate channel pairs, (…, T, d). Channels after the rotated ones are unchanged."""
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
    """Return the largest difference relative to the largest value."""
    return float((x - expected).abs().max() / expected.abs().max().clamp(min=1e-300))
