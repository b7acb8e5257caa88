"""Why a token looked there: a score shared out among pairs of parts, one in the stream at the query, one at the key.

A score is a bilinear form. With the norm's scale frozen at what it was, the query is a sum over what had been written into
the stream at its token (the embedding, every earlier head, every MLP, biases), and so is the key; so the score is a sum over
pairs of parts, exactly (https://transformer-circuits.pub/2021/framework). Softmax sees differences of scores alone: what is
the same for every key moves nothing, and `lead=True` leaves it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.analysis.attribution.logit_attribution import as_ids
from headwise.analysis.attribution.path_trace import Link, follow
from headwise.analysis.attribution.qk_transform import ROUNDINGS, Turning, find_turning
from headwise.analysis.attribution.residual_parts import Stream, stream_roundings
from headwise.analysis.recording.attention_maps import Parts, Word
from headwise.analysis.recording.batching import tokenizer_of
from headwise.errors import HeadwiseError
from headwise.heads import Head
from headwise.kernels.precision import rounding_bound
from headwise.kernels.score_params import visible_scores
from headwise.model import AnyModel
from headwise.spec import Address

TOLERANCE = 1e-3  # relative to the largest of the score and the pairs
POSITION = "position bias"


class PartPair(NamedTuple):
    """What a part of the stream at the query and one at the key add to the score; `share` is of the sum of all sizes."""

    query: str
    key: str
    score: float
    share: float


@dataclass(frozen=True, eq=False)
class Why:
    """One score of one head, shared out. `total` is the sum of all pairs, `score` what the model itself computed."""

    text: str
    head: str
    at: str
    to: str
    weight: float  # the attention there
    score: float
    table: Tensor  # (parts at the query, parts at the key), float64
    names: tuple[str, ...]  # of the parts, the same on both sides
    position: float  # what a bias by distance adds; 0 where there is none
    lead: bool  # whether all of it is above the mean over the visible keys
    chain: tuple[Link, ...]  # the strongest pair, followed back to the tokens it began at
    rounding: float = 0.0  # bound on the rounding error of `score` in the model's dtype

    @property
    def total(self) -> float:
        """The sum of all pairs."""
        return float(self.table.sum()) + self.position

    @property
    def error(self) -> float:
        """How far the sum is from the model's own score, beside the largest of the score and the pairs."""
        return abs(self.total - self.score) / self._largest

    @property
    def complete(self) -> bool:
        """Whether the pairs add up to the model's score, within its rounding."""
        return abs(self.total - self.score) <= max(TOLERANCE * self._largest, self.rounding)

    @property
    def _largest(self) -> float:
        return max(abs(self.score), float(self.table.abs().max()), abs(self.position), 1e-30)

    @cached_property
    def pairs(self) -> tuple[PartPair, ...]:
        """All pairs, the largest first, for or against."""
        size = max(float(self.table.abs().sum()) + abs(self.position), 1e-30)
        made = [PartPair(POSITION, POSITION, self.position, self.position / size)] if self.position else []
        scores = self.table.tolist()
        made += [
            PartPair(query, key, score, score / size)
            for query, row in zip(self.names, scores, strict=True)
            for key, score in zip(self.names, row, strict=True)
        ]
        return tuple(sorted(made, key=lambda pair: -abs(pair.score)))

    def side(self, which: str) -> list[tuple[str, float]]:
        """What each part at the query adds, whatever it meets, or each part at the key: the largest first."""
        if which not in ("query", "key"):
            raise HeadwiseError(f"a side is 'query' or 'key', got {which!r}.")
        sums = self.table.sum(1 if which == "query" else 0).tolist()
        return sorted(zip(self.names, sums, strict=True), key=lambda part: -abs(part[1]))

    def rank(self, query: str, key: str) -> int:
        """At which place a pair stands, from 1."""
        for place, pair in enumerate(self.pairs):
            if (pair.query, pair.key) == (query, key):
                return place + 1
        raise HeadwiseError(f"there is no pair of {query!r} and {key!r}; parts are {', '.join(self.names[:6])}, …")

    def to_dict(self, most: int = 20) -> dict[str, Any]:
        """As plain data, with so many of its pairs."""
        said = {name: getattr(self, name) for name in ("text", "head", "at", "to", "weight", "score", "total", "error")}
        chain = [link._asdict() for link in self.chain]
        return {**said, "lead": self.lead, "pairs": [pair._asdict() for pair in self.pairs[:most]], "chain": chain}


@torch.no_grad()
def why(
    model: AnyModel,
    text: str | Sequence[int] | Tensor,
    head: str | Address,
    at: Word,
    to: Word | None = None,
    *,
    lead: bool = False,
    words: bool = True,
) -> Why:
    """Share out the score with which `at` looks at `to` in a head: a word each, "the#2", or its place in the text.

    Of a word of several tokens the last one looks, and the most attended one is looked at; without `to` it is the most
    attended word; words=False keeps tokens apart. With `lead` it is the lead of that score over the mean of all that the
    token sees. For decoders whose stream is a sum; others are refused, with the reason.

    >>> from headwise.model import Transformer
    >>> from headwise.spec import preset
    >>> made = why(Transformer(preset("nano")), [72, 105, 33], "2.1", at=2, to=0)
    >>> made.complete, len(made.names), made.names[:2], made.names[-1]
    (True, 16, ('embedding', '0.0'), 'biases')
    """
    address = Address.parse(head) if isinstance(head, str) else head
    one = model.heads[address]
    named = _named_parts(model, text, words)
    ids = as_ids(model, text)
    looks = named.tokens[named.find(at)][-1]
    stream = Stream.of(model, ids, address.layer)
    call = stream.recording[address].only
    weights = call.map(rows=looks)[0, 0].float()  # (T,)
    scale, bias, visible = _terms(call, looks)
    place = named.find(to) if to is not None else _most_attended(named, weights)
    seen = max(named.tokens[place], key=lambda token: float(weights[token]))
    if seen not in visible:
        raise HeadwiseError(f"{named.names[named.find(at)]!r} cannot see {named.names[place]!r} in {address}.")
    keys = visible if lead else [seen]
    turning = _turning(stream, address)
    names, asks = _side(stream, turning, one, "q", [looks])  # (P, 1, d)
    _, offers = _side(stream, turning, one, "k", keys)  # (P, S, d)
    every = scale * torch.einsum("ad,bsd->sab", asks[:, 0], offers)  # (S, P, P)
    here = keys.index(seen)
    own = scale * float(call.q[0, looks].double() @ call.k[0, seen].double()) + float(bias[seen])
    table, position = every[here], float(bias[seen])
    if lead:
        table = table - every.mean(0)
        position -= float(bias[visible].mean())
        scores = scale * (call.k[0, visible].double() @ call.q[0, looks].double()) + bias[visible]
        own -= float(scores.mean())
    best = divmod(int(table.abs().argmax()), len(names))
    chain = _chain(stream, turning, one, names, best, asks, offers[:, here], (looks, seen), scale)
    shown = tuple(_named(named, link) for link in chain)
    said = text if isinstance(text, str) else " ".join(named.labels)
    at_name, to_name = named.names[named.find(at)], named.names[place]
    return Why(
        said, str(address), at_name, to_name, float(weights[seen]), own, table, tuple(names), position, lead, shown,
        _rounding(call, address.layer, looks, keys) * abs(scale),
    )  # fmt: skip


def _terms(call: Any, row: int) -> tuple[float, Tensor, list[int]]:
    """The scale of scores, the bias of a row over all keys, (S,), and which keys it sees; capped scores are no sum."""
    (T, S), terms = call._call.sizes, call._call.terms
    if terms.softcap is not None:
        raise HeadwiseError("scores of this model are capped by a tanh, so they are no sum over pairs of parts.")
    index = call._index
    own = terms.for_heads(range(index, index + 1), range(terms.groups[index], terms.groups[index] + 1))
    blank = torch.zeros(1, 1, 1, S, dtype=torch.double, device=call.q.device)
    bias = visible_scores(blank, own, range(row, row + 1), range(S), T, S)[0, 0, 0]  # (S,): −inf where nothing is seen
    visible = torch.isfinite(bias).nonzero()[:, 0].tolist()
    return terms.scale, bias, visible


def _rounding(call: Any, layer: int, looks: int, keys: list[int]) -> float:
    """Bound the rounding error of q·k: relative to |q||k|, over the roundings that the query and the key went through."""
    q, k = call.q[0, looks].double(), call.k[0, keys].double()  # (d,), (n, d)
    return rounding_bound(call.q.dtype, 2 * (stream_roundings(layer) + ROUNDINGS)) * float(
        q.norm() * k.norm(dim=1).max()
    )


def _turning(stream: Stream, head: Address) -> Turning:
    """What stood between W_Q, W_K and the scores of a head's layer in this pass."""
    layer, read = stream.layer_of(head), stream.read.double()  # (T, D)
    stream.check_sum(head.layer)
    heads = list(stream.model.heads.select(layer.site.addresses))
    keys = {one.kv_index: one for one in reversed(heads)}  # one head for each key head
    sharing = [keys[i] for i in sorted(keys)]
    projected = {
        "q": torch.stack([_projected(read, one.W_Q, one.b_Q) for one in heads]),  # (H, T, d)
        "k": torch.stack([_projected(read, one.W_K, one.b_K) for one in sharing]),  # (K, T, d)
    }
    met = {
        "q": torch.cat([stream.recording[one.address].only.q for one in heads]).double(),
        "k": torch.cat([stream.recording[one.address].only.k for one in sharing]).double(),
    }
    return find_turning(layer, projected, met, stream.read.dtype)


def _projected(read: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made = read @ weight.double()  # (T, d)
    return made if bias is None else made + bias.double()


def _side(stream: Stream, turning: Turning, one: Head, letter: str, positions: list[int]) -> tuple[list[str], Tensor]:
    """What each part brings to one head's query, or key, at some positions: names, (P, n, d)."""
    names, read = stream.as_read(one.address.layer, positions)  # (P, n, D)
    weight, bias = (one.W_Q, one.b_Q) if letter == "q" else (one.W_K, one.b_K)
    made = read @ weight.double()  # (P, n, d)
    if bias is not None:
        made[-1] += bias.double()  # the biases come last
    return names, turning.turn(letter, one.index if letter == "q" else one.kv_index, made, positions)


def _chain(
    stream: Stream, turning: Turning, one: Head, names: list[str], best: tuple[int, int], asks: Tensor, offers: Tensor,
    places: tuple[int, int], scale: float,
) -> list[Link]:  # fmt: skip
    """The strongest pair followed back on both sides: each side's part by the direction that the other side reads."""
    query, key = best
    layer = one.address.layer
    links = []
    for side, letter, name, place, other in (
        ("query", "q", names[query], places[0], offers[key]),
        ("key", "k", names[key], places[1], asks[query, 0]),
    ):
        weight = (one.W_Q if letter == "q" else one.W_K).double()  # (D, d)
        unit = torch.eye(weight.shape[1], dtype=torch.double, device=weight.device)[:, None]  # (d, 1, d)
        index = one.index if letter == "q" else one.kv_index
        turned = turning.turn(letter, index, unit, [place])[:, 0]  # (d, d): rows are channels before turning
        direction = scale * weight @ (turned @ other)  # (D,)
        links += follow(stream, side, name, layer, place, direction)
    return links


def _named_parts(model: AnyModel, text: str | Sequence[int] | Tensor, words: bool) -> Parts:
    """What is named in a text: its words or tokens; of ids, every token by its place."""
    if isinstance(text, str):
        return Parts.of(tokenizer_of(model).align(text), words)
    ids = as_ids(model, text)[0].tolist()
    tokenizer: Any = model.tokenizer
    labels = tuple(str(i) if tokenizer is None else tokenizer.token(i) for i in ids)
    return Parts(labels, tuple((i,) for i in range(len(ids))), (False,) * len(ids))


def _most_attended(words: Parts, weights: Tensor) -> int:
    return int((weights @ words.sums(weights)).argmax())


def _named(words: Parts, link: Link) -> Link:
    """The same with tokens as a person reads them."""

    def name(token: int) -> str:
        return next(words.names[i] for i, tokens in enumerate(words.tokens) if token in tokens)

    looked = None if link.looks_at is None else name(int(link.looks_at))
    return link._replace(token=name(int(link.token)), looks_at=looked)
