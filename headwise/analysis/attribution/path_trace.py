"""A part of the stream followed back: a head wrote it because it looked at a token, where something had been written."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.attribution.residual_parts import BIASES, Stream
from headwise.spec import Address


class Link(NamedTuple):
    """One step back: a part at a token, and for a head the token it took most of this from."""

    side: str  # query or key
    part: str
    token: Any
    score: float  # what it adds to the score along this way
    looks_at: Any = None  # the token whose value brought most of it; None where the way ends
    weight: float | None = None  # the attention on it
    brought: float | None = None  # of the score, what came from there


def follow(stream: Stream, side: str, part: str, layer: int, place: int, direction: Tensor) -> list[Link]:
    """From a part of what a layer read at a place, back to an embedding, an MLP or the biases.

    `direction` (D,) is what the score reads of what the layer read; its norm is frozen.
    """
    links: list[Link] = []
    while True:
        names, read = stream.as_read(layer, [place])  # (P, 1, D)
        score = float(read[names.index(part), 0] @ direction)
        if part == BIASES or not part[0].isdigit():
            return [*links, Link(side, part, place, score)]
        head = Address.parse(part)
        one, call = stream.model.heads[head], stream.recording[head].only
        before = _before_norm(stream, layer, place, direction, head.layer)  # (D,)
        weights = call.map(rows=place)[0, 0].double()  # (S,)
        reads = one.W_O.double() @ before  # (e,)
        brought = weights * (call.v[0].double() @ reads)  # (S,)
        source = int(brought.abs().argmax())
        links.append(Link(side, part, place, score, source, float(weights[source]), float(brought[source])))
        layer, place, direction = head.layer, source, weights[source] * (one.W_V.double() @ reads)
        names, read = stream.as_read(layer, [place])
        shares = read[:, 0] @ direction  # (P,)
        part = names[int(shares.abs().argmax())]


def _before_norm(stream: Stream, layer: int, place: int, direction: Tensor, wrote: int) -> Tensor:
    """What a direction behind a layer's norm is for what an earlier layer's head wrote into the stream: (D,)."""
    norm, after = stream.norm(layer), stream.wiring.steps[wrote].after
    if norm is not None:
        parts = torch.stack([part for _, part in stream.parts(layer, [place])]).sum((0, 1))  # (D,)
        direction = norm.back(direction, parts)
    if after is not None:
        direction = after.back(direction, stream.caught.wrote[wrote][place])
    return direction
