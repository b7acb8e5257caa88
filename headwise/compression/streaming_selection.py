"""Which key heads may stream: ways to rank them, one entry each, and the choice that follows.

KV heads with the lowest score stream first. A low score does not recommend a head: on ordinary text heads that retrieve have
low scores, too. `streaming_cost` measures the loss on texts that need retrieval. `streaming_rankers` is imported on demand.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError, suggest_names
from headwise.heads import MultiHeadAttention
from headwise.model import Transformer
from headwise.spec import Address, CachePolicy
from headwise.spec.cache_policy import KEEP_ALL
from headwise.text.corpus import Corpus

if TYPE_CHECKING:
    from headwise.progress import Progress

Scores = dict[Address, float]  # of key heads


@dataclass(frozen=True)
class StreamRankingInput:
    """What a way is given beside the model; each takes what it needs."""

    corpus: Corpus | None
    fraction: float
    policy: CachePolicy
    max_length: int  # tokens of a text
    seed: int
    gate_steps: int
    progress: "Progress | None"

    @property
    def retained_tokens(self) -> int:
        """Tokens nobody has forgotten: up to here nothing can differ."""
        assert self.policy.window is not None
        return self.policy.sink_tokens + self.policy.window


@dataclass(frozen=True)
class StreamRanker:
    """One way to rank key heads."""

    rank: Callable[[Transformer, StreamRankingInput], Scores]
    score_description: str = ""  # what a key head's score is; nothing where it says nothing
    needs_corpus: bool = True  # asks the model about texts of a corpus
    supports_rounds: bool = False  # may be asked in rounds, with those chosen so far streaming


def _rank_by_attention(model: Transformer, inputs: StreamRankingInput) -> Scores:
    from headwise.compression.streaming_rankers import score_by_attention

    return score_by_attention(model, inputs)


def _rank_by_output_change(model: Transformer, inputs: StreamRankingInput) -> Scores:
    from headwise.compression.streaming_rankers import score_by_output_change

    return score_by_output_change(model, inputs)


def _rank_by_loss(model: Transformer, inputs: StreamRankingInput) -> Scores:
    from headwise.compression.streaming_rankers import score_by_loss

    return score_by_loss(model, inputs)


def _rank_by_gates(model: Transformer, inputs: StreamRankingInput) -> Scores:
    from headwise.compression.streaming_rankers import score_by_gates

    return score_by_gates(model, inputs)


def _rank_by_role(model: Transformer, inputs: StreamRankingInput) -> Scores:
    from headwise.compression.streaming_rankers import score_by_retrieval

    return score_by_retrieval(model, inputs)


def _rank_randomly(model: Transformer, inputs: StreamRankingInput) -> Scores:
    import numpy as np

    values = np.random.default_rng(inputs.seed).random(len(model.spec.kv_head_addresses))
    return dict(zip(model.spec.kv_head_addresses, values.tolist(), strict=True))


STREAM_RANKERS = {
    "attention": StreamRanker(_rank_by_attention, "share of attention on what it would forget", supports_rounds=True),
    "output": StreamRanker(
        _rank_by_output_change, "how far what its heads write moves, against the stream", supports_rounds=True
    ),
    "loss": StreamRanker(
        _rank_by_loss, "what the loss gains when it alone streams, nats a token", supports_rounds=True
    ),
    "gates": StreamRanker(_rank_by_gates, "how far its gate was left open"),
    "role": StreamRanker(_rank_by_role, "how much it looks at what is repeated or to be copied", needs_corpus=False),
    "random": StreamRanker(_rank_randomly, needs_corpus=False),
}


def get_stream_ranker(ranking: str) -> StreamRanker:
    """A way by its name.

    >>> get_stream_ranker("random").needs_corpus
    False
    """
    if ranking not in STREAM_RANKERS:
        raise HeadwiseError(f"key heads cannot be ranked by {ranking!r}; {suggest_names(str(ranking), STREAM_RANKERS)}")
    return STREAM_RANKERS[ranking]


def select_streaming_heads(
    model: Transformer,
    fraction: float,
    policy: CachePolicy,
    ranking: str,
    corpus: Any,
    max_length: int | None,
    seed: int,
    gate_steps: int,
    rounds: int,
    protected_fraction: float,
    progress: "Progress | None",
) -> tuple[tuple[Address, ...], Scores, str]:
    """The key heads that stream, every key head's score, and the corpus as a plan tells it."""
    ranker = get_stream_ranker(ranking)
    model.check_native(
        "key heads are chosen in headwise's own decoders; else name them: plan_pruning(model, cache={…})"
    )
    if model.spec.kind != "decoder":
        raise HeadwiseError(
            "key heads are chosen in headwise's own decoders; else name them: plan_pruning(model, cache={…})."
        )
    if model.spec.cache:
        raise HeadwiseError("this model's key heads keep less already; choose in the model it came from.")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise HeadwiseError(f"fraction is the part of the key heads that stream, from 0 to 1; got {fraction!r}.")
    if ranker.needs_corpus and corpus is None:
        raise HeadwiseError(f"ranking by {ranking} asks the model, so it needs a text: give corpus=….")
    assert policy.window is not None
    max_length = min(1024, model.spec.context) if max_length is None else max_length
    if ranker.needs_corpus and max_length <= policy.sink_tokens + policy.window:
        raise HeadwiseError(
            f"texts of {max_length} tokens are all within {policy.sink_tokens} + {policy.window}, so nothing is forgotten; "
            f"give a larger max_length=…, or a smaller window=…."
        )
    if type(rounds) is not int or rounds < 1:
        raise HeadwiseError(f"key heads are chosen in rounds, 1 or more; got {rounds!r}.")
    if rounds > 1 and not ranker.supports_rounds:
        round_rankers = " | ".join(name for name, entry in STREAM_RANKERS.items() if entry.supports_rounds)
        raise HeadwiseError(f"{ranking} ranks all key heads at once, so rounds say nothing; choose by {round_rankers}.")
    if (
        isinstance(protected_fraction, bool)
        or not isinstance(protected_fraction, int | float)
        or not 0 <= protected_fraction <= 1 - fraction
    ):
        raise HeadwiseError(
            f"protected_fraction is the part of the key heads that never stream, at most {1 - fraction:g}; "
            f"got {protected_fraction!r}."
        )
    ranking_corpus = Corpus.of(corpus) if ranker.needs_corpus else None
    inputs = StreamRankingInput(ranking_corpus, fraction, policy, max_length, seed, gate_steps, progress)
    selected, scores = _select_in_rounds(
        model, ranker, inputs, rounds, _protected_heads(model, inputs, protected_fraction)
    )
    corpus_name = "" if ranking_corpus is None else f"{ranking_corpus.name} ({ranking_corpus.fingerprint[:12]})"
    return tuple(head for head in model.spec.kv_head_addresses if head in selected), scores, corpus_name


def _protected_heads(model: Transformer, inputs: StreamRankingInput, protected_fraction: float) -> set[Address]:
    """The share of key heads that find most of what is repeated, however little they seem to matter on the texts asked."""
    heads = model.spec.kv_head_addresses
    count = round(protected_fraction * len(heads))
    if not count:
        return set()
    scores = _rank_by_role(model, inputs)
    return set(sorted(heads, key=lambda head: scores[head], reverse=True)[:count])


def _select_in_rounds(
    model: Transformer, ranker: StreamRanker, inputs: StreamRankingInput, rounds: int, protected: set[Address]
) -> tuple[set[Address], Scores]:
    """A few key heads at a time; the others are then asked about again, with those streaming. Those spared stay whole.

    Nobody's score is told as less than that of a head chosen in an earlier round, so scores stay in the order of the choice.
    """
    heads, selected, scores, min_score = model.spec.kv_head_addresses, set[Address](), Scores(), -math.inf
    for round_number in range(rounds):
        with streaming(model, tuple(selected), inputs.policy):
            round_scores = ranker.rank(model, inputs)
        scores |= {head: max(round_scores[head], min_score) for head in heads if head not in selected}
        candidates = sorted(
            (head for head in heads if head not in selected | protected), key=lambda head: round_scores[head]
        )
        selected |= set(candidates[: round(inputs.fraction * len(heads) * (round_number + 1) / rounds) - len(selected)])
        min_score = math.nextafter(max((scores[head] for head in selected), default=-math.inf), math.inf)
    return selected, scores


@contextmanager
def streaming(model: Transformer, heads: tuple[Address, ...], policy: CachePolicy) -> Iterator[None]:
    """While open, these key heads keep so little."""
    with ExitStack() as stack:
        for layer in model.attention_layers():
            kv_heads = [head.head for head in heads if head.layer_address == layer.hook_point.address]
            if kv_heads:
                stack.enter_context(cache_policy_override(layer, kv_heads, policy))
        yield


@contextmanager
def cache_policy_override(layer: MultiHeadAttention, head_ids: list[int], policy: CachePolicy) -> Iterator[None]:
    """While open, key heads of one layer, by their original numbers, keep so little."""
    saved_spec = layer.spec
    cache = list(saved_spec.cache or (KEEP_ALL,) * saved_spec.kv_heads)
    for head_id in head_ids:
        cache[head_id] = policy
    layer.spec = replace(saved_spec, cache=tuple(cache))
    try:
        yield
    finally:
        layer.spec = saved_spec
