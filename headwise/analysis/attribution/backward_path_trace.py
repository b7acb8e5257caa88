"""A part of the stream followed back: a head wrote it because it looked at a token, where something had been written."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.attribution.residual_parts import BIASES, ResidualParts
from headwise.spec import Address


class AttentionPathStep(NamedTuple):
    """One step back: a part at a token, and for a head the token it took most of this from."""

    side: str  # query or key
    part: str
    token: Any
    score: float  # what it adds to the score along this way
    source_token: Any = None  # the token whose value brought most of it; None where the way ends
    attention: float | None = None  # the attention on it
    source_score: float | None = None  # of the score, what came from there


def trace_path(
    residual_parts: ResidualParts, side: str, part: str, layer: int, position: int, direction: Tensor
) -> list[AttentionPathStep]:
    """From a part of what a layer read at a place, back to an embedding, an MLP or the biases.

    `direction` (D,) is what the score reads of what the layer read; its norm is frozen.
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
        weights = call.map(rows=position)[0, 0].double()  # (S,)
        value_direction = head_view.W_O.double() @ stream_direction  # (e,)
        contributions = weights * (call.v[0].double() @ value_direction)  # (S,)
        source = int(contributions.abs().argmax())
        steps.append(
            AttentionPathStep(side, part, position, score, source, float(weights[source]), float(contributions[source]))
        )
        layer, position, direction = head.layer, source, weights[source] * (head_view.W_V.double() @ value_direction)
        names, inputs = residual_parts.layer_input_parts(layer, [position])
        part_scores = inputs[:, 0] @ direction  # (P,)
        part = names[int(part_scores.abs().argmax())]


def _before_norm(
    residual_parts: ResidualParts, layer: int, position: int, direction: Tensor, writer_layer: int
) -> Tensor:
    """What a direction behind a layer's norm is for what an earlier layer's head wrote into the stream: (D,)."""
    norm, post_norm = residual_parts.input_norm(layer), residual_parts.residual.layers[writer_layer].post_norm
    if norm is not None:
        parts = torch.stack([part for _, part in residual_parts.parts(layer, [position])]).sum((0, 1))  # (D,)
        direction = norm.pull_back(direction, parts)
    if post_norm is not None:
        direction = post_norm.pull_back(direction, residual_parts.capture.attention_outputs[writer_layer][position])
    return direction
