"""What is known of heads beside their profile: what they write, whom they resemble and work with, what they are worth and
could cost less."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from headwise.analysis.ablation.head_outputs import eval_corpus
from headwise.analysis.ablation.importance import HeadImportance, importance
from headwise.analysis.ablation.sensitivity import QuantizationCost, sensitivity
from headwise.analysis.attribution.attended_token_effect import AttendedLogitEffect, direct_effects
from headwise.analysis.attribution.ov_analysis import TokenEffects, copying_scores, effects_of_attended_tokens
from headwise.analysis.metrics.long_offsets import OUTSIDE_WINDOW, STREAMING_POLICY
from headwise.analysis.recording.batching import reachable_hook_points
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.profile_result import HeadProfile, Profile
from headwise.analysis.roles.prompt_roles import STREAMING_THRESHOLD
from headwise.analysis.similarity.attention_similarity import js_sums, record_rows, sample_rows
from headwise.analysis.similarity.weight_similarity import (
    compress_product_columns,
    compress_product_rows,
    fold_norms_into_heads,
    pairwise_product_norms,
)
from headwise.compression.streaming_cost import StreamingEvaluator, StreamingTestResult
from headwise.compression.streaming_selection import streaming
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, Transformer, eval_mode
from headwise.progress import Progress
from headwise.spec import Address, ModelSpec
from headwise.spec.cache_policy import KEEP_ALL
from headwise.spec.parallel_cost import kv_head_cache_bytes

COMPARISON_SIZE = {"rows": 64, "max_length": 64}  # what heads are compared on
NUM_NEAREST = 5  # heads that look alike, of each
MAX_MULTIPLICATIONS = (
    2e12  # multiplications for all compositions; beyond that they are left out, for they would take minutes
)
CACHE_TOKENS = 4096  # tokens that bytes of caches are told for
ABLATION_TEXTS = 32  # texts one head is taken away on
BITS, PARTS = (4,), ("qk", "vo", "keys", "values")


@dataclass(frozen=True)
class OVSummary:
    """Output of one head: its OV eigenvalue score, the words it promotes, and its effect on the attended token's logit."""

    copying: float  # OV eigenvalue score
    random_std: float  # its standard deviation over random weights
    token_effects: tuple[TokenEffects, ...] = ()
    effect: AttendedLogitEffect | None = None  # None: not measured


@dataclass(frozen=True)
class AblationSummary:
    """What is lost without a head, and how that was found out."""

    importance: HeadImportance
    ranking: str
    ablation: str
    unit: str  # nats a token, or 1 − cosine
    texts: int


@dataclass(frozen=True)
class CompressionCostSummary:
    """What a head's weights at few bits would cost, and what its cache holds."""

    costs: tuple[QuantizationCost, ...] = ()
    unit: str = ""
    texts: int = 0
    cache_bytes: int = 0  # bytes of its key head at CACHE_TOKENS tokens; 0: it keeps none
    kv_head: str = ""
    streaming_cost: StreamingTestResult | None = None  # None: not measured


@dataclass(frozen=True)
class ComposedHead:
    """An earlier head whose writes a head reads, or a later one that reads its own: V-composition, and what chance gives."""

    head: str
    score: float
    random_score: float


@dataclass(frozen=True)
class HeadFacts:
    """What is known of one head beside its profile; None: it was not asked."""

    ov_summary: OVSummary | None = None
    ablation: AblationSummary | None = None
    cost: CompressionCostSummary | None = None
    kv_siblings: tuple[str, ...] = ()  # heads that read the same keys
    reads_from: ComposedHead | None = None
    read_by: ComposedHead | None = None
    similar_heads: tuple[tuple[str, float], ...] = ()  # heads that look alike, nearest first, in nats
    errors: tuple[str, ...] = ()  # why something could not be found out


def gather_facts(
    model: ModelProtocol, head: HeadProfile, corpus: Any = None, progress: Progress | None = None
) -> HeadFacts:
    """All that can be found out about one head in a minute or so: it is taken away, rounded and compared."""
    address, errors, results = head.address, [], {}
    unit = "nats a token" if model.output is not None else "1 − cosine"

    def tokenized_corpus() -> (
        TokenizedCorpus
    ):  # an encoder-decoder is asked about pairs, which a profile has not read: that is refused
        return eval_corpus(model, corpus, None).first(ABLATION_TEXTS)

    def ablation_summary() -> AblationSummary:
        head_importance = importance(model, tokenized_corpus(), heads=f"{address.layer_address}.*", progress=progress)
        return AblationSummary(
            head_importance[address], head_importance.ranking, head_importance.ablation, unit, head_importance.texts
        )

    def cost_summary() -> CompressionCostSummary:
        parts = PARTS if address in heads_with_cache(model.spec) else PARTS[:2]
        costs = sensitivity(model, tokenized_corpus(), heads=str(address), bits=BITS, parts=parts, progress=progress)
        nbytes, kv_head = cache_bytes_of(model.spec, address)
        # Without the attention condition streaming is not recommended, so its loss is not measured either.
        local = head.metrics.get(OUTSIDE_WINDOW.name, math.nan) < STREAMING_THRESHOLD
        streaming = streaming_cost(model, kv_head, corpus) if nbytes and local else None
        return CompressionCostSummary(tuple(costs), costs.metric, len(costs.counts), nbytes, kv_head, streaming)

    for name, work in (
        ("ov_summary", lambda: _ov_summary(model, head, _effects(model, corpus, str(address)))),
        ("ablation", ablation_summary),
        ("cost", cost_summary),
    ):
        try:
            results[name] = work()
        except HeadwiseError as error:  # an encoder promotes no words, say: the rest is told all the same
            errors.append(str(error))
    reads_from, read_by = composition_partners(model).get(str(address), (None, None))
    similar = nearest_heads(model).get(str(address), [])
    return HeadFacts(
        **results, kv_siblings=kv_siblings(model.spec, address), reads_from=reads_from, read_by=read_by,
        similar_heads=tuple((str(other), float(distance)) for other, distance in similar),
        errors=tuple(dict.fromkeys(errors)),
    )  # fmt: skip


def _effects(model: ModelProtocol, corpus: Any = None, heads: str = "*") -> dict[str, AttendedLogitEffect]:
    """Direct effects of heads; none if the model has no unembedding that can be read."""
    try:
        return direct_effects(model, corpus, heads)
    except HeadwiseError:
        return {}


def _ov_summary(model: ModelProtocol, head: HeadProfile, effects: Mapping[str, AttendedLogitEffect]) -> OVSummary:
    score = copying_scores(model, str(head.address))[str(head.address)]
    try:
        token_effects = tuple(effects_of_attended_tokens(model, head)) if model.output is not None else ()
    except HeadwiseError:  # its logits are no sum over heads: nothing can be read off
        token_effects = ()
    return OVSummary(score, copying_std(model.spec), token_effects, effects.get(str(head.address)))


def ov_summaries(model: ModelProtocol, profile: Profile) -> dict[str, OVSummary]:
    """Describe the output of each head: OV eigenvalue score, direct effect, and words promoted and suppressed."""
    effects = _effects(model)
    return {str(head.address): _ov_summary(model, head, effects) for head in profile}


def copying_std(spec: ModelSpec) -> float:
    """Standard deviation of the OV eigenvalue score over random weights."""
    return 1.5 / spec.attention.value_dim


def heads_with_cache(spec: ModelSpec) -> tuple[Address, ...]:
    """Heads whose keys and values are kept while a model writes."""
    return tuple(address for address in spec.head_addresses if cache_bytes_of(spec, address)[0])


def cache_bytes_of(spec: ModelSpec, head: Address) -> tuple[int, str]:
    """Bytes that the key head of a head keeps at CACHE_TOKENS tokens, and its address; 0 where nothing is kept."""
    layer = spec.attention_at(head.layer_address)
    kv_head = head.layer_address.head_address(layer.kv_head_ids[layer.kv_of_head[layer.head_ids.index(head.head)]])
    return (
        (kv_head_cache_bytes(layer, KEEP_ALL, CACHE_TOKENS), str(kv_head))
        if kv_head in spec.kv_head_addresses
        else (0, str(kv_head))
    )


def kv_siblings(spec: ModelSpec, head: Address) -> tuple[str, ...]:
    """The other heads that read the same keys."""
    layer = spec.attention_at(head.layer_address)
    kv_index = layer.kv_of_head[layer.head_ids.index(head.head)]
    pairs = zip(layer.head_ids, layer.kv_of_head, strict=True)
    return tuple(
        str(head.layer_address.head_address(n)) for n, head_kv in pairs if head_kv == kv_index and n != head.head
    )


def streaming_cost(model: ModelProtocol, kv_head: str, corpus: Any = None) -> StreamingTestResult | None:
    """Measure the loss with this KV head streaming; None if the model has no cache per head."""
    if model.spec.kind != "decoder" or model.output is None or model.spec.cache:
        return None
    try:
        model.check_native("only headwise's own models have a cache per head")
    except HeadwiseError:
        return None
    native = cast(Transformer, model)
    evaluation = StreamingEvaluator.of(native, STREAMING_POLICY, corpus)
    with streaming(native, (Address.parse(kv_head),), STREAMING_POLICY):
        return evaluation.test(native)


def nearest_heads(model: ModelProtocol) -> dict[str, list[list[Any]]]:
    """The heads that look most alike, by Jensen–Shannon divergence on a few rows of the probe set: [head, nats]."""
    addresses = tuple(address for hook_point in reachable_hook_points(model) for address in hook_point.head_addresses)
    if len(addresses) < 2 or model.image_input is not None:  # heads are compared on texts
        return {}
    sums, rows = np.zeros((len(addresses),) * 2), 0
    with eval_mode(model), torch.no_grad():
        for samples, positions in sample_rows(
            model, None, COMPARISON_SIZE["rows"], COMPARISON_SIZE["max_length"], len(addresses), 0
        ):
            maps = record_rows(model, samples, positions, set(addresses)).maps  # (H, rows, S + 1)
            sums += js_sums(maps.flatten(1))
            rows += maps.shape[1]
    distances = sums / rows + np.where(np.eye(len(addresses)), np.inf, 0.0)
    order = np.argsort(distances, axis=1, kind="stable")[:, : min(NUM_NEAREST, len(addresses) - 1)]
    return {str(a): [[str(addresses[j]), round6(distances[i, j])] for j in order[i]] for i, a in enumerate(addresses)}


def composition_partners(model: ModelProtocol) -> dict[str, tuple[ComposedHead | None, ComposedHead | None]]:
    """For each head the earlier one whose writes it reads most, and the later one that reads its own most, by weights.

    ‖OV[a] OV[b]‖ / ‖OV[a]‖‖OV[b]‖, norms folded in; empty where norms are not known, sizes differ or the work is too much.
    """
    addresses, spec = model.spec.head_addresses, model.spec.attention
    if (
        len(addresses) < 2
        or model.input_norms() is None
        or len(addresses) ** 2 * spec.value_dim**2 * spec.width > MAX_MULTIPLICATIONS
    ):
        return {}
    try:
        heads = fold_norms_into_heads(model, addresses)
    except HeadwiseError:  # heads of different sizes
        return {}
    W_V, W_O = (torch.stack([head.weights[projection] for head in heads]) for projection in "vo")
    output_factors, input_factors = compress_product_rows(W_V, W_O), compress_product_columns(W_V, W_O)
    sizes = (x.double().square().sum((1, 2)).sqrt().cpu().numpy() for x in (output_factors, input_factors))
    output_norms, input_norms = sizes
    stream_positions = [(head.streams["o"], head.streams["v"]) for head in heads]
    is_earlier = np.array(
        [[a[0].name == b[1].name and a[0].order < b[1].order for b in stream_positions] for a in stream_positions]
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        score = np.sqrt(pairwise_product_norms(output_factors, input_factors)) / (output_norms[:, None] * input_norms)
    score = np.where(is_earlier & np.isfinite(score), score, -1.0)  # (H, H): a is read by b
    random_score = spec.width**-0.5

    def best_partner(row: np.ndarray) -> ComposedHead | None:
        index = int(np.argmax(row))
        return (
            ComposedHead(str(addresses[index]), float(row[index]), random_score)
            if row[index] > 2 * random_score
            else None
        )

    return {str(a): (best_partner(score[:, i]), best_partner(score[i])) for i, a in enumerate(addresses)}


def round6(value: float) -> float | None:
    """Six digits: enough to read, half the bytes."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
