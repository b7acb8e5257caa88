"""Select the KV heads that stream: a table of ranking methods, and the selection by score.

KV heads with the lowest scores stream first. A low score is not a recommendation: on ordinary text, retrieval heads have low
scores too. `streaming_cost` measures the loss on texts that need retrieval.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis.metrics.far_attention import attention_outside_window
from headwise.analysis.metrics.induction import make_repeated_sequences
from headwise.analysis.metrics.listen_at_hook_points import listen_at_hook_points
from headwise.analysis.metrics.retrieval import make_needle_texts
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.compression.duo_attention_pattern_reader import read_attention_pattern
from headwise.compression.l0_gates import ANNEAL_FRACTION, LearnedGates, add_sparsity_gradient, gate_training
from headwise.errors import ArgumentError, UnsupportedModelError, suggest_names
from headwise.heads.hook_point import AttentionCall
from headwise.kernels.batched import attention_weight_rows
from headwise.kernels.enable_grad import enable_gradients
from headwise.kernels.rounding_tolerance import at_least_float32, to_float64
from headwise.model import ModelProtocol, eval_mode
from headwise.model.simulated_streaming_forward import streaming
from headwise.progress import Progress
from headwise.spec import Address, AttentionSpec, CachePolicy, LayerAddress
from headwise.spec.model import CACHED_STACKS
from headwise.text.corpus import Corpus

DEFAULT_MAX_LENGTH = 1024  # tokens per text, or the context of the model if it is shorter
SAMPLED_ROWS = 64  # query positions per text at which attention is measured

Scores = dict[Address, float]  # by KV head


@dataclass(frozen=True)
class StreamingRequest:
    """The KV heads that stream: how many, their cache policy, and how they are ranked.

    Attributes:
        fraction: Fraction of the KV heads that stream.
        sink_tokens: First tokens of a text that a streaming head caches.
        window: Last tokens that it caches.
        bits: Bits of the keys and values of all KV heads.
        ranking: Ranking method: attention (attention on evicted tokens), output (change of the head outputs), loss (loss
            increase if one KV head streams), gates (learned gates), role (heads that find repeated tokens do not stream),
            pattern (scores of a file) or random.
        corpus: A text, a list of texts, a path or a Corpus. KV heads are ranked on it.
        max_length: Tokens of a text; None: 1024, or the context of the model if it is shorter.
        seed: Seed of random rankings and gates.
        gate_steps: Training steps of learned gates.
        rounds: Number of selection rounds. Each round ranks the remaining KV heads with the selected ones streaming.
        protected_fraction: Fraction of the KV heads that never stream: those that find repeated or copied tokens best.
        pattern: File with a score per KV head for ranking="pattern", such as DuoAttention's `full_attention_heads.tsv`.

    >>> StreamingRequest(0.5, sink_tokens=4, window=16).retained_tokens
    20
    """

    fraction: float = 0.5
    sink_tokens: int = 4
    window: int = 128
    bits: int = 32
    ranking: str = "output"
    corpus: Any = None
    max_length: int | None = None
    seed: int = 0
    gate_steps: int = 60
    rounds: int = 1
    protected_fraction: float = 0.0
    pattern: str | Path | None = None

    @classmethod
    def from_pattern(cls, path: str | Path, fraction: float = 0.5, bits: int = 32) -> "StreamingRequest":
        """Return the request for an attention pattern that DuoAttention publishes, with the sizes next to it.

        Args:
            path: File `full_attention_heads.tsv`. A `config.json` next to it gives sink tokens and window.
            fraction: Fraction of the KV heads that stream: those with the lowest scores.
            bits: Bits of the keys and values of all KV heads.
        """
        pattern = read_attention_pattern(path)
        sizes = {"sink_tokens": pattern.sink_tokens, "window": pattern.window}
        sizes = {name: size for name, size in sizes.items() if size is not None}
        return cls(fraction, bits=bits, ranking="pattern", pattern=path, **sizes)

    def __post_init__(self) -> None:
        ranker = get_stream_ranker(self.ranking)
        if (self.pattern is None) == (self.ranking == "pattern"):
            raise ArgumentError(
                f"pattern: a file of scores needs ranking='pattern', and this ranking method needs a file. Got "
                f"pattern={self.pattern!r} and ranking={self.ranking!r}. Set both or neither."
            )
        CachePolicy(self.bits, self.sink_tokens, self.window)  # raises if it is not valid
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int | float) or not 0 <= self.fraction <= 1:
            raise ArgumentError(
                f"fraction: the fraction of streaming KV heads must be from 0 to 1. Got {self.fraction!r}. Use fraction=0.5."
            )
        if type(self.rounds) is not int or self.rounds < 1:
            raise ArgumentError(
                f"rounds: must be an integer of at least 1. Got {self.rounds!r}. Use rounds=1 for one round."
            )
        if self.rounds > 1 and not ranker.supports_rounds:
            round_rankers = " | ".join(name for name, entry in STREAM_RANKERS.items() if entry.supports_rounds)
            raise ArgumentError(
                f"rounds: the ranking method {self.ranking!r} ranks all KV heads at once and does not support rounds. "
                f"Got rounds={self.rounds}. Use rounds=1, or ranking={round_rankers}."
            )
        if (
            isinstance(self.protected_fraction, bool)
            or not isinstance(self.protected_fraction, int | float)
            or not 0 <= self.protected_fraction <= 1 - self.fraction
        ):
            raise ArgumentError(
                "protected_fraction: the fraction of KV heads that never stream must be a number from 0 to "
                f"{1 - self.fraction:g}, because fraction={self.fraction:g} of the KV heads stream. "
                f"Got {self.protected_fraction!r}. Decrease protected_fraction or fraction."
            )

    @property
    def policy(self) -> CachePolicy:
        """Cache policy of a streaming KV head, at full precision."""
        return CachePolicy(sink_tokens=self.sink_tokens, window=self.window)

    @property
    def retained_tokens(self) -> int:
        """Number of tokens that a streaming KV head caches. Texts of this length are not affected by streaming."""
        return self.sink_tokens + self.window

    def resolve(self, model: ModelProtocol) -> "StreamingRequest":
        """Return the request with the corpus and text length for this model. Raise if the model does not suit it."""
        needs_corpus = get_stream_ranker(self.ranking).needs_corpus
        if model.spec.kind != "decoder":
            raise UnsupportedModelError(
                "model: streaming KV heads can be selected only in decoders. In an encoder-decoder, name them: "
                f"plan_pruning(model, cache={{'5.*': CachePolicy(sink_tokens=4, window=128)}}). Got kind {model.spec.kind!r}."
            )
        if model.spec.cache:
            raise UnsupportedModelError(
                "model: some of its KV heads have a reduced cache already. "
                "Select streaming heads in the original model, without cache policies."
            )
        if needs_corpus and self.corpus is None:
            raise ArgumentError(
                f"corpus: the ranking method {self.ranking!r} needs texts. Got None. Give corpus=…, or use ranking='role'."
            )
        max_length = min(DEFAULT_MAX_LENGTH, model.spec.context) if self.max_length is None else self.max_length
        if needs_corpus and max_length <= self.retained_tokens:
            raise ArgumentError(
                f"max_length: texts of {max_length} tokens fit into the streaming cache of {self.sink_tokens} sink tokens + "
                f"{self.window} window tokens, so no token is evicted. Increase max_length, or decrease window."
            )
        return replace(self, corpus=Corpus.of(self.corpus) if needs_corpus else None, max_length=max_length)


@dataclass(frozen=True)
class StreamRanker:
    """One ranking method for KV heads.

    Attributes:
        rank: Function that returns the score of each KV head.
        score_description: Meaning of a score. Empty for random scores.
        needs_corpus: Whether the method runs the model on texts of a corpus.
        supports_rounds: Whether the method can rank again while the selected KV heads stream.
    """

    rank: Callable[[ModelProtocol, StreamingRequest, Progress | None], Scores]
    score_description: str = ""
    needs_corpus: bool = True
    supports_rounds: bool = False


@torch.no_grad()
def _rank_by_attention(model: ModelProtocol, request: StreamingRequest, progress: Progress | None) -> Scores:
    """Rank by the fraction of attention on tokens that the KV head would evict, over queries after the first eviction.

    The score is the maximum over the query heads of the KV head. A mean would hide one query head that needs evicted tokens.
    """
    total = {
        layer.address: torch.zeros(len(layer.head_ids), dtype=torch.float64, device="cpu")
        for layer in model.gathered_hook_points()
    }
    row_count = 0

    def on_call(call: AttentionCall, rows: list[int], _first: int) -> None:
        for row in rows:
            evicted_mass = attention_outside_window(call.map_rows([row])[0], [row], request.policy)  # (H, 1)
            total[call.hook_point.address] += to_float64(evicted_mass[:, 0]).cpu()

    texts = _long_texts(model, request)
    for index, ids in enumerate(texts):
        rows = (
            torch.linspace(
                request.retained_tokens,
                ids.shape[1] - 1,
                min(SAMPLED_ROWS, ids.shape[1] - request.retained_tokens),
                device="cpu",
                dtype=torch.float32,
            )
            .long()
            .tolist()
        )
        row_count += len(rows)
        with eval_mode(model), listen_at_hook_points(model.gathered_hook_points(), on_call, rows):
            model(ids, hidden=True)
        _report_progress(progress, "attention outside the window", index + 1, len(texts))
    means = {layer: sums / row_count for layer, sums in total.items()}
    return _reduce_per_kv_head(model, means, torch.amax)


@torch.no_grad()
def _rank_by_output_change(model: ModelProtocol, request: StreamingRequest, progress: Progress | None) -> Scores:
    """Rank by the squared change of the head outputs if the KV head streams, relative to the squared residual stream.

    Only rows after the first eviction count. A head with uniform attention may attend to evicted tokens and have the same
    output without them.
    """
    change: Scores = dict.fromkeys(model.spec.cached_kv_head_addresses, 0.0)
    texts = _long_texts(model, request)

    def on_layer(layer: Any, x: Tensor, full: Tensor, streamed: Tensor) -> None:
        difference = at_least_float32(full - streamed)[0, :, request.retained_tokens :]  # (H, n, e)
        residual_norm = at_least_float32(x[0, request.retained_tokens :]).square().sum(-1)  # (n,)
        for kv_index, kv_head in enumerate(layer.spec.kv_head_ids):
            heads = [head for head, kv_of in enumerate(layer.spec.kv_of_head) if kv_of == kv_index]
            output_change = torch.einsum("hne,hed->nd", difference[heads], layer.hook_point.W_O[heads].to(difference))
            change[layer.hook_point.address.head_address(kv_head)] += (
                output_change.square().sum(-1) / residual_norm
            ).mean().item() / len(texts)

    for index, ids in enumerate(texts):
        with eval_mode(model):
            model.streaming_forward().compare(ids, request.policy, on_layer)
        _report_progress(progress, "output change of each KV head", index + 1, len(texts))
    return change


@torch.no_grad()
def _rank_by_loss(model: ModelProtocol, request: StreamingRequest, progress: Progress | None) -> Scores:
    """Rank by the loss increase of tokens after the first eviction if this KV head alone streams."""
    loss_increase: Scores = dict.fromkeys(model.spec.cached_kv_head_addresses, 0.0)
    texts, token_count = _long_texts(model, request), 0
    for index, ids in enumerate(texts):
        with eval_mode(model):
            passes = model.streaming_forward().per_head(ids, request.policy)
            losses = {head: _summed_loss_after_eviction(model, x, ids, request.retained_tokens) for head, x in passes}
        token_count += ids.shape[1] - 1 - request.retained_tokens
        full_loss = losses.pop(None)
        for head, loss in losses.items():
            assert head is not None
            loss_increase[head] += loss - full_loss
        _report_progress(progress, "loss of each KV head", index + 1, len(texts))
    return {head: value / token_count for head, value in loss_increase.items()}


def _rank_by_gates(
    model: ModelProtocol, request: StreamingRequest, progress: Progress | None, rate: float = 0.1
) -> Scores:
    """Rank by learned gates. A gate interpolates between the z of a KV head with all keys and with streaming.

    The loss is the squared change of the final hidden states, as in DuoAttention (https://arxiv.org/abs/2410.10819). The
    expected fraction of open gates is lowered to the fraction of KV heads that do not stream, as in `l0_gates`.
    """
    if request.gate_steps < 1:
        raise ArgumentError(f"gate_steps: must be at least 1. Got {request.gate_steps}. Use gate_steps=60.")
    texts = _long_texts(model, request)
    with enable_gradients(model), gate_training(model, train_weights=False), torch.random.fork_rng():
        torch.manual_seed(request.seed)
        gates = LearnedGates({layer.hook_point.address: len(layer.spec.kv_head_ids) for layer in _cached_layers(model)})
        gates = gates.to(model.device)
        optimizer = torch.optim.Adam(gates.parameters(), lr=rate)
        initial_fraction, keep = gates.open_fraction().item(), 1 - request.fraction
        for step in range(request.gate_steps):
            ids = texts[step % len(texts)]
            with torch.no_grad():
                reference = at_least_float32(model(ids, hidden=True)[:, request.retained_tokens :])  # (1, n, D)
            hidden = model.streaming_forward().gated(ids, gates.sample(1), request.policy)
            difference = hidden[:, request.retained_tokens :] - reference
            loss = difference.square().sum(-1).mean() / reference.square().sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            add_sparsity_gradient(gates)
            optimizer.step()
            gates.set_open_fraction(
                initial_fraction
                + (keep - initial_fraction) * min(1.0, (step + 1) / max(1.0, ANNEAL_FRACTION * request.gate_steps))
            )
            _report_progress(progress, "gates", step + 1, request.gate_steps)
        open_probability = gates.open_probability().tolist()
    return dict(zip(model.spec.cached_kv_head_addresses, open_probability, strict=True))


@torch.no_grad()
def _rank_by_retrieval_attention(model: ModelProtocol, request: StreamingRequest, progress: Progress | None) -> Scores:
    """Rank by the maximum attention of the query heads to repeated tokens: the token after the first copy, the first copy
    itself, or the next token of a needle that is being copied. Heads with high scores keep their full cache, as in
    RazorAttention (https://arxiv.org/abs/2407.15891)."""
    repeats, head_counts = (
        make_repeated_sequences(model, seed=request.seed),
        {layer.address: len(layer.head_ids) for layer in model.gathered_hook_points()},
    )
    sums = {layer: torch.zeros(3, n, dtype=torch.float64, device="cpu") for layer, n in head_counts.items()}
    second_copy = range(repeats.second_copy.start, repeats.second_copy.stop)

    def on_call(call: AttentionCall, _first: int) -> None:
        weights = attention_weight_rows(
            at_least_float32(call.q), at_least_float32(call.k), call.params, second_copy
        )  # (B, H, m, S)
        for index, offset in enumerate((repeats.length - 1, repeats.length)):
            diagonal = weights.diagonal(second_copy.start - offset, -2, -1)[..., : len(second_copy)]  # (B, H, m)
            sums[call.hook_point.address][index] += to_float64(diagonal.mean((0, 2))).cpu()

    if repeats.length:
        with eval_mode(model), listen_at_hook_points(model.gathered_hook_points(), on_call):
            model(repeats.repeated, hidden=True)
    needles = make_needle_texts(model, request.corpus, request.seed)
    copied = 0
    for index, needle in enumerate(needles):
        target_of_row = {row: target for row, target in enumerate(needle.copy_source_positions) if target >= 0}
        hits_by_layer: dict[LayerAddress, Tensor] = {}

        def on_needle_call(
            call: AttentionCall, _first: int, target_of_row=target_of_row, hits_by_layer=hits_by_layer
        ) -> None:
            needle_weights = call.map_rows(list(target_of_row))  # (1, H, rows, S)
            targets = torch.tensor(list(target_of_row.values()), device=needle_weights.device)
            hits_by_layer[call.hook_point.address] = to_float64(
                needle_weights[0].argmax(-1) == targets
            ).cpu()  # (H, rows)

        ids = torch.tensor([needle.ids], device=model.device)
        with eval_mode(model), listen_at_hook_points(model.gathered_hook_points(), on_needle_call):
            predicted = model(ids)[0].argmax(-1)  # (T,)
        correct = torch.tensor(
            [int(predicted[row]) == needle.ids[row + 1] for row in target_of_row], dtype=torch.float64, device="cpu"
        )
        copied += int(correct.sum())
        for layer, hits in hits_by_layer.items():
            sums[layer][2] += (hits * correct).sum(-1)
        _report_progress(progress, "needles", index + 1, len(needles))
    means = {
        layer: torch.stack((layer_sums[0], layer_sums[1], layer_sums[2] / max(1, copied))).amax(0)
        for layer, layer_sums in sums.items()
    }
    return _reduce_per_kv_head(model, means, torch.amax)


def _rank_by_pattern_file(model: ModelProtocol, request: StreamingRequest, progress: Progress | None) -> Scores:
    """Rank by the scores of a file."""
    assert request.pattern is not None
    return read_attention_pattern(request.pattern).scores_of(model.spec.cached_kv_head_addresses)


def _rank_randomly(model: ModelProtocol, request: StreamingRequest, progress: Progress | None) -> Scores:
    values = np.random.default_rng(request.seed).random(len(model.spec.cached_kv_head_addresses))
    return dict(zip(model.spec.cached_kv_head_addresses, values.tolist(), strict=True))


STREAM_RANKERS = {
    "attention": StreamRanker(_rank_by_attention, "fraction of attention on evicted tokens", supports_rounds=True),
    "output": StreamRanker(
        _rank_by_output_change,
        "squared change of the head outputs, relative to the residual stream",
        supports_rounds=True,
    ),
    "loss": StreamRanker(
        _rank_by_loss, "loss increase if only this KV head streams, nats per token", supports_rounds=True
    ),
    "gates": StreamRanker(_rank_by_gates, "probability that the learned gate of the KV head is open"),
    "role": StreamRanker(
        _rank_by_retrieval_attention, "maximum attention to repeated or copied tokens", needs_corpus=False
    ),
    "pattern": StreamRanker(
        _rank_by_pattern_file, "score of the file: 1 needs all tokens, 0 streams", needs_corpus=False
    ),
    "random": StreamRanker(_rank_randomly, needs_corpus=False),
}


def get_stream_ranker(ranking: str) -> StreamRanker:
    """Return a ranking method by its name.

    >>> get_stream_ranker("random").needs_corpus
    False
    """
    if ranking not in STREAM_RANKERS:
        raise ArgumentError(f"ranking: unknown method. Got {ranking!r}; {suggest_names(str(ranking), STREAM_RANKERS)}")
    return STREAM_RANKERS[ranking]


def select_streaming_heads(
    model: ModelProtocol, request: StreamingRequest, progress: Progress | None
) -> tuple[tuple[Address, ...], Scores, str]:
    """Return the KV heads that stream, the score of every KV head, and the description of the corpus."""
    request = request.resolve(model)
    selected, scores = _select_in_rounds(model, request, _protected_heads(model, request, progress), progress)
    corpus_name = "" if request.corpus is None else request.corpus.description
    return tuple(head for head in model.spec.cached_kv_head_addresses if head in selected), scores, corpus_name


def _protected_heads(model: ModelProtocol, request: StreamingRequest, progress: Progress | None) -> set[Address]:
    """Return the KV heads that attend most to repeated tokens. They never stream, whatever their score."""
    heads = model.spec.cached_kv_head_addresses
    count = round(request.protected_fraction * len(heads))
    if not count:
        return set()
    scores = _rank_by_retrieval_attention(model, request, progress)
    return set(sorted(heads, key=lambda head: scores[head], reverse=True)[:count])


def _select_in_rounds(
    model: ModelProtocol, request: StreamingRequest, protected: set[Address], progress: Progress | None
) -> tuple[set[Address], Scores]:
    """Select streaming KV heads in rounds. Each round ranks the other KV heads while the selected ones stream.

    Scores of a round are raised to at least those of earlier selected heads, so that scores sort in the order of selection.
    """
    heads, selected, scores, min_score = model.spec.cached_kv_head_addresses, set[Address](), Scores(), -math.inf
    ranker, rounds = get_stream_ranker(request.ranking), request.rounds
    for round_number in range(rounds):
        with streaming(model, tuple(selected), request.policy):
            round_scores = ranker.rank(model, request, progress)
        scores |= {head: max(round_scores[head], min_score) for head in heads if head not in selected}
        candidates = sorted(
            (head for head in heads if head not in selected | protected), key=lambda head: round_scores[head]
        )
        selected |= set(
            candidates[: round(request.fraction * len(heads) * (round_number + 1) / rounds) - len(selected)]
        )
        min_score = math.nextafter(max((scores[head] for head in selected), default=-math.inf), math.inf)
    return selected, scores


def _cached_layers(model: Any) -> list[Any]:
    """Return the attention layers whose keys and values are cached."""
    return [layer for layer in model.attention_layers() if layer.hook_point.address.stack in CACHED_STACKS]


def _long_texts(model: ModelProtocol, request: StreamingRequest) -> list[Tensor]:
    """Return the token ids of texts that are long enough for an eviction, (1, T) each."""
    corpus = TokenizedCorpus.of(model, request.corpus, request.max_length)
    texts = [
        torch.tensor([sample.ids], device=model.device)
        for sample in corpus
        if len(sample.ids) > request.retained_tokens + 1
    ]
    if not texts:
        raise ArgumentError(
            f"corpus: no text is longer than the {request.retained_tokens} tokens that a streaming KV head caches, so no "
            "token is evicted. Give longer texts, or decrease window."
        )
    return texts


def _summed_loss_after_eviction(model: ModelProtocol, x: Tensor, ids: Tensor, retained_tokens: int) -> float:
    """Return the summed loss of the tokens after the first eviction, from final hidden states (1, T, D)."""
    assert model.output is not None
    return model.output.cross_entropy(x[0, retained_tokens:-1], ids[0, retained_tokens + 1 :], total=1).item()


def _reduce_per_kv_head(
    model: ModelProtocol, values: dict[LayerAddress, Tensor], reduce: Callable[[Tensor], Tensor]
) -> Scores:
    """Reduce values of query heads, (H,) per layer, over the query heads of each KV head."""
    scores: Scores = {}
    for head in model.spec.cached_kv_head_addresses:
        layer = model.spec.attention_at(head.layer_address)
        scores[head] = float(reduce(values[head.layer_address][_query_heads_of(layer, head)]))
    return scores


def _query_heads_of(layer: AttentionSpec, head: Address) -> list[int]:
    """Return the indices of the query heads that use a KV head."""
    kv_index = layer.kv_head_ids.index(head.head)
    return [i for i, kv_of in enumerate(layer.kv_of_head) if kv_of == kv_index]


def _report_progress(progress: Progress | None, label: str, done: int, total: int) -> None:
    if progress is not None:
        progress(label, done, total)
