"""Trace a contribution to the residual stream back through heads to the token it came from."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.attribution.residual_parts import BIASES, ResidualParts
from headwise.heads import MultiHeadAttention
from headwise.kernels.rounding_tolerance import to_float64
from headwise.spec import Address


class AttentionPathStep(NamedTuple):
    """One step of a path: a part of the residual stream, and for a head its most important source token.

    Attributes:
        side: "query" or "key".
        part: A head address, "mlp.<layer>", "embedding" or "biases".
        token: Token at which the part was written.
        score: Contribution of the part to the score along this path.
        source_token: Token whose value contributed most. None at the end of the path.
        attention: Attention weight of the head on `source_token`.
        source_score: Contribution of `source_token` to `score`.
    """

    side: str
    part: str
    token: Any
    score: float
    source_token: Any = None
    attention: float | None = None
    source_score: float | None = None


def trace_part_to_origin(
    residual_parts: ResidualParts, side: str, part: str, layer: int, position: int, direction: Tensor
) -> list[AttentionPathStep]:
    """Follow a part of a layer's input back to an embedding, an MLP or the biases.

    Args:
        residual_parts: The recorded pass.
        side: "query" or "key", copied into the steps.
        part: Name of the part to follow.
        layer: Layer that reads the part.
        position: Token position at which the layer reads it.
        direction: (D,), gradient of the score with respect to the layer input, with the norm frozen.
    """
    steps: list[AttentionPathStep] = []
    while True:
        names, inputs = residual_parts.layer_input_parts(layer, [position])  # (P, 1, D)
        score = float(inputs[names.index(part), 0] @ direction)
        if part == BIASES or not part[0].isdigit():
            return [*steps, AttentionPathStep(side, part, position, score)]
        head = Address.parse(part)
        head_view, call = residual_parts.model.heads[head], residual_parts.recording[head].only_call
        stream_direction = _before_norm(residual_parts, layer, position, direction, head.layer)  # (D,)
        weights = to_float64(call.map(rows=position)[0, 0])  # (S,)
        value_direction = to_float64(head_view.W_O) @ stream_direction  # (e,)
        value_direction = value_direction * _gate(residual_parts, head, position).to(value_direction.device)
        contributions = weights * (to_float64(call.v[0]) @ value_direction)  # (S,)
        source = int(contributions.abs().argmax())
        steps.append(
            AttentionPathStep(side, part, position, score, source, float(weights[source]), float(contributions[source]))
        )
        layer, position, direction = head.layer, source, weights[source] * (to_float64(head_view.W_V) @ value_direction)
        names, inputs = residual_parts.layer_input_parts(layer, [position])
        part_scores = inputs[:, 0] @ direction  # (P,)
        part = names[int(part_scores.abs().argmax())]


def _gate(residual_parts: ResidualParts, head: Address, position: int) -> Tensor:
    """Return the factor of the z of a head at a position by the gates of a native layer, (1 or e,)."""
    layer = residual_parts.layer_of(head)
    factor = to_float64(torch.ones(1, device=layer.hook_point.W_O.device, dtype=torch.float32))
    if not isinstance(layer, MultiHeadAttention):
        return factor
    index = layer.hook_point.head_index(head)
    if layer.gate is not None:
        factor = factor * to_float64(layer.gate[index])
    if layer.output_gate is None:
        return factor
    inputs = residual_parts.layer_input_parts(head.layer, [position])[1].sum(0)  # (1, D)
    gates = layer.output_gate(inputs[None].to(residual_parts.read))  # (1, H, 1, 1 or e)
    return factor * to_float64(gates[0, index, 0])


def _before_norm(
    residual_parts: ResidualParts, layer: int, position: int, direction: Tensor, writer_layer: int
) -> Tensor:
    """Map a direction at a layer's normed input to the output of a head in an earlier layer: (D,)."""
    norm, post_norm = residual_parts.input_norm(layer), residual_parts.residual.layers[writer_layer].post_norm
    if norm is not None:
        parts = torch.stack([part for _, part in residual_parts.parts(layer, [position])]).sum((0, 1))  # (D,)
        direction = norm.pull_back(direction, parts)
    if post_norm is not None:
        direction = post_norm.pull_back(direction, residual_parts.capture.attention_outputs[writer_layer][position])
    return direction
