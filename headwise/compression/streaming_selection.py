"""Which key heads may stream: ways to rank them, one entry each, and the choice that follows.

KV heads with the lowest score stream first. A low score does not recommend a head: on ordinary text heads that retrieve have
low scores, too. `streaming_cost` measures the loss on texts that need retrieval. `stream_ways` is imported on demand.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError, close_names
from headwise.heads import MultiHeadAttention
from headwise.model import Transformer
from headwise.spec import Address, Keeps
from headwise.spec.cache_policy import ALL
from headwise.text.corpus import Corpus

if TYPE_CHECKING:
    from headwise.progress import Progress

Scores = dict[Address, float]  # of key heads


@dataclass(frozen=True)
class StreamQuestion:
    """What a way is given beside the model; each takes what it needs."""

    on: Corpus | None
    share: float
    keeps: Keeps
    longest: int  # tokens of a text
    seed: int
    steps: int
    progress: "Progress | None"

    @property
    def room(self) -> int:
        """Tokens nobody has forgotten: up to here nothing can differ."""
        assert self.keeps.last is not None
        return self.keeps.first + self.keeps.last


@dataclass(frozen=True)
class StreamWay:
    """One way to rank key heads."""

    rank: Callable[[Transformer, StreamQuestion], Scores]
    score: str = ""  # what a key head's score is; nothing where it says nothing
    reads: bool = True  # asks the model about texts of a corpus
    again: bool = False  # may be asked in rounds, with those chosen so far streaming


def _mass(model: Transformer, ask: StreamQuestion) -> Scores:
    from headwise.compression.streaming_rankers import looks_beyond

    return looks_beyond(model, ask)


def _writes(model: Transformer, ask: StreamQuestion) -> Scores:
    from headwise.compression.streaming_rankers import moved_writes

    return moved_writes(model, ask)


def _loss(model: Transformer, ask: StreamQuestion) -> Scores:
    from headwise.compression.streaming_rankers import loss_of_each

    return loss_of_each(model, ask)


def _gates(model: Transformer, ask: StreamQuestion) -> Scores:
    from headwise.compression.streaming_rankers import gates_of_each

    return gates_of_each(model, ask)


def _role(model: Transformer, ask: StreamQuestion) -> Scores:
    from headwise.compression.streaming_rankers import finds_repeats

    return finds_repeats(model, ask)


def _random(model: Transformer, ask: StreamQuestion) -> Scores:
    import numpy as np

    draws = np.random.default_rng(ask.seed).random(len(model.spec.key_heads))
    return dict(zip(model.spec.key_heads, draws.tolist(), strict=True))


STREAM_WAYS = {
    "mass": StreamWay(_mass, "share of attention on what it would forget", again=True),
    "writes": StreamWay(_writes, "how far what its heads write moves, against the stream", again=True),
    "loss": StreamWay(_loss, "what the loss gains when it alone streams, nats a token", again=True),
    "gates": StreamWay(_gates, "how far its gate was left open"),
    "role": StreamWay(_role, "how much it looks at what is repeated or to be copied", reads=False),
    "random": StreamWay(_random, reads=False),
}


def stream_way(by: str) -> StreamWay:
    """A way by its name.

    >>> stream_way("random").reads
    False
    """
    if by not in STREAM_WAYS:
        raise HeadwiseError(f"key heads cannot be ranked by {by!r}; {close_names(str(by), STREAM_WAYS)}")
    return STREAM_WAYS[by]


def choose_streaming(
    model: Transformer,
    share: float,
    keeps: Keeps,
    by: str,
    on: Any,
    longest: int | None,
    seed: int,
    steps: int,
    rounds: int,
    spare: float,
    progress: "Progress | None",
) -> tuple[tuple[Address, ...], Scores, str]:
    """The key heads that stream, every key head's score, and the corpus as a plan tells it."""
    way = stream_way(by)
    model.check_own("key heads are chosen in headwise's own decoders; else name them: Plan.make(model, cache={…})")
    if model.spec.kind != "decoder":
        raise HeadwiseError(
            "key heads are chosen in headwise's own decoders; else name them: Plan.make(model, cache={…})."
        )
    if model.spec.cache:
        raise HeadwiseError("this model's key heads keep less already; choose in the model it came from.")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise HeadwiseError(f"share is the part of the key heads that stream, from 0 to 1; got {share!r}.")
    if way.reads and on is None:
        raise HeadwiseError(f"ranking by {by} asks the model, so it needs a text: give on=….")
    assert keeps.last is not None
    longest = min(1024, model.spec.context) if longest is None else longest
    if way.reads and longest <= keeps.first + keeps.last:
        raise HeadwiseError(
            f"texts of {longest} tokens are all within {keeps.first} + {keeps.last}, so nothing is forgotten; give a larger "
            f"longest=…, or a smaller last=…."
        )
    if type(rounds) is not int or rounds < 1:
        raise HeadwiseError(f"key heads are chosen in rounds, 1 or more; got {rounds!r}.")
    if rounds > 1 and not way.again:
        several = " | ".join(name for name, other in STREAM_WAYS.items() if other.again)
        raise HeadwiseError(f"{by} ranks all key heads at once, so rounds say nothing; choose by {several}.")
    if isinstance(spare, bool) or not isinstance(spare, int | float) or not 0 <= spare <= 1 - share:
        raise HeadwiseError(
            f"spare is the part of the key heads that never stream, at most {1 - share:g}; got {spare!r}."
        )
    corpus = Corpus.of(on) if way.reads else None
    ask = StreamQuestion(corpus, share, keeps, longest, seed, steps, progress)
    chosen, scores = _in_rounds(model, way, ask, rounds, _spared(model, ask, spare))
    told = "" if corpus is None else f"{corpus.name} ({corpus.fingerprint[:12]})"
    return tuple(head for head in model.spec.key_heads if head in chosen), scores, told


def _spared(model: Transformer, ask: StreamQuestion, spare: float) -> set[Address]:
    """The share of key heads that find most of what is repeated, however little they seem to matter on the texts asked."""
    heads = model.spec.key_heads
    number = round(spare * len(heads))
    if not number:
        return set()
    found = _role(model, ask)
    return set(sorted(heads, key=lambda head: found[head], reverse=True)[:number])


def _in_rounds(
    model: Transformer, way: StreamWay, ask: StreamQuestion, rounds: int, spared: set[Address]
) -> tuple[set[Address], Scores]:
    """A few key heads at a time; the others are then asked about again, with those streaming. Those spared stay whole.

    Nobody's score is told as less than that of a head chosen in an earlier round, so scores stay in the order of the choice.
    """
    heads, chosen, scores, least = model.spec.key_heads, set[Address](), Scores(), -math.inf
    for number in range(rounds):
        with streaming_now(model, tuple(chosen), ask.keeps):
            found = way.rank(model, ask)
        scores |= {head: max(found[head], least) for head in heads if head not in chosen}
        rest = sorted((head for head in heads if head not in chosen | spared), key=lambda head: found[head])
        chosen |= set(rest[: round(ask.share * len(heads) * (number + 1) / rounds) - len(chosen)])
        least = math.nextafter(max((scores[head] for head in chosen), default=-math.inf), math.inf)
    return chosen, scores


@contextmanager
def streaming_now(model: Transformer, heads: tuple[Address, ...], keeps: Keeps) -> Iterator[None]:
    """While open, these key heads keep so little."""
    with ExitStack() as stack:
        for layer in model.attention_layers():
            here = [head.head for head in heads if head.site == layer.site.address]
            if here:
                stack.enter_context(layer_keeping(layer, here, keeps))
        yield


@contextmanager
def layer_keeping(layer: MultiHeadAttention, numbers: list[int], keeps: Keeps) -> Iterator[None]:
    """While open, key heads of one layer, by their original numbers, keep so little."""
    before = layer.spec
    cache = list(before.cache or (ALL,) * before.kv_heads)
    for number in numbers:
        cache[number] = keeps
    layer.spec = replace(before, cache=tuple(cache))
    try:
        yield
    finally:
        layer.spec = before
