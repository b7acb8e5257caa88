"""Facts about heads in addition to their profile: output, importance, similar heads and composition partners."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.importance import Importance, SingleHeadImportance
from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
from headwise.analysis.attribution.copy_logit_effect import CopyLogitEffect, direct_effects
from headwise.analysis.attribution.head_output_scores import (
    TokenEffects,
    ov_eigenvalue_scores,
    top_context_token_effects,
)
from headwise.analysis.load_or_measure import load_or_measure_importance
from headwise.analysis.recording.batching import reachable_hook_points
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.similarity.attention_similarity import (
    js_sums,
    js_sums_of_head,
    record_rows,
    sample_texts_and_query_positions,
)
from headwise.analysis.similarity.weight_similarity import (
    compress_product_columns,
    compress_product_rows,
    fold_norms_into_heads,
    pairwise_product_squared_norms,
)
from headwise.errors import HeadwiseError
from headwise.io.result_store import ResultStore
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import Progress
from headwise.spec import Address, ModelSpec

COMPARISON_SIZE = {"rows": 64, "max_length": 64}  # attention rows and maximum text length of the head comparison
NUM_NEAREST = 5  # similar heads listed per head
MAX_MULTIPLICATIONS = 2e12  # composition scores are left out if they need more multiplications, which takes minutes
ABLATION_TEXTS = 32  # texts of the ablation of one head


@dataclass(frozen=True)
class OVSummary:
    """Output of one head.

    Attributes:
        copying: OV eigenvalue score, from −1 to 1.
        random_std: Standard deviation of the score over random weights.
        token_effects: Tokens that the head promotes and suppresses.
        effect: Direct effect on the logit of the attended token, or None if not measured.
    """

    copying: float
    random_std: float
    token_effects: tuple[TokenEffects, ...] = ()
    effect: CopyLogitEffect | None = None


@dataclass(frozen=True)
class AblationSummary:
    """Importance of one head and how it was measured.

    Attributes:
        importance: Importance with its confidence interval.
        ranking: Ranking method.
        ablation: Kind of ablation.
        unit: Unit of the importance: nats per token, or 1 − cosine for a model without an output layer.
        texts: Number of texts.
    """

    importance: SingleHeadImportance
    ranking: str
    ablation: str
    unit: str
    texts: int


@dataclass(frozen=True)
class ComposedHead:
    """A head that another head composes with (V-composition).

    Attributes:
        head: Address of the earlier or later head.
        score: Composition score.
        random_score: Expected score of random weights.
    """

    head: str
    score: float
    random_score: float


@dataclass(frozen=True)
class HeadFacts:
    """Facts about one head in addition to its profile. None means not measured.

    Attributes:
        ov_summary: Output of the head.
        ablation: Importance of the head.
        kv_siblings: Other heads with the same KV head.
        reads_from: Earlier head whose output it reads most.
        read_by: Later head that reads its output most.
        similar_heads: Heads with similar attention and their Jensen–Shannon divergence in nats, most similar first.
        errors: Reasons why a fact could not be measured.
    """

    ov_summary: OVSummary | None = None
    ablation: AblationSummary | None = None
    kv_siblings: tuple[str, ...] = ()
    reads_from: ComposedHead | None = None
    read_by: ComposedHead | None = None
    similar_heads: tuple[tuple[str, float], ...] = ()
    errors: tuple[str, ...] = ()


def measure_related_heads(model: ModelProtocol, head: Address) -> HeadFacts:
    """Return the facts about a head that need neither its profile nor a corpus: related and similar heads."""
    reads_from, read_by = composition_partners(model, head).get(str(head), (None, None))
    nearest = nearest_heads(model, head).get(str(head), [])
    similar = tuple((str(other), float(distance)) for other, distance in nearest)
    return HeadFacts(None, None, kv_siblings(model.spec, head), reads_from, read_by, similar)


def measure_head_facts(
    model: ModelProtocol,
    head_profile: HeadProfile,
    corpus: Any = None,
    progress: Progress | None = None,
    *,
    related: HeadFacts | None = None,
    store: ResultStore | None = None,
) -> HeadFacts:
    """Measure the facts about one head: analyze its weights, ablate it, compare it with other heads.

    Args:
        model: The model.
        head_profile: Profile of the head.
        corpus: Texts for the ablation and the direct effect. None selects the default corpus.
        progress: Called with the state of the ablation.
        related: Result of `measure_related_heads`, if already measured.
        store: Store of the ablation results. None measures them.
    """
    address, errors, ov_summary, ablation = str(head_profile.address), [], None, None
    try:
        ov_summary = _ov_summary(model, head_profile, _attended_logit_effects(model, corpus, address))
    except HeadwiseError as error:  # for example, an encoder has no output vocabulary
        errors.append(str(error))
    try:
        # raises an error for an encoder-decoder, which needs text pairs
        tokenized = eval_corpus(model, corpus, None).first(ABLATION_TEXTS)
        layer_heads = f"{head_profile.address.layer_address}.*"
        measured = load_or_measure_importance(model, tokenized, [layer_heads], store=store, progress=progress)
        ablation = ablation_summary(model, measured, address)
    except HeadwiseError as error:
        errors.append(str(error))
    related = related or measure_related_heads(model, head_profile.address)
    return replace(related, ov_summary=ov_summary, ablation=ablation, errors=tuple(dict.fromkeys(errors)))


def collect_facts(
    model: ModelProtocol, profile: Profile, head_importance: Importance | None = None
) -> dict[str, HeadFacts]:
    """Collect the facts about all heads of a profile, by address. Ablation results come from `head_importance`, if given."""
    ov_by_head, similar, partners = ov_summaries(model, profile), nearest_heads(model), composition_partners(model)
    measured = {} if head_importance is None else dict.fromkeys(map(str, head_importance.addresses), head_importance)
    facts = {}
    for address in profile.addresses:
        head = str(address)
        reads_from, read_by = partners.get(head, (None, None))
        facts[head] = HeadFacts(
            ov_by_head.get(head), ablation_summary(model, measured[head], head) if head in measured else None,
            kv_siblings(model.spec, address), reads_from, read_by,
            tuple((other, distance) for other, distance in similar.get(head, []) if distance is not None),
        )  # fmt: skip
    return facts


def ablation_summary(model: ModelProtocol, head_importance: Importance, head: str) -> AblationSummary:
    """Summarize the importance of one head, with its unit."""
    unit = "nats per token" if model.output is not None else "1 − cosine"
    return AblationSummary(
        head_importance[head], head_importance.ranking, head_importance.ablation, unit, head_importance.texts
    )


def _attended_logit_effects(model: ModelProtocol, corpus: Any = None, heads: str = "*") -> dict[str, CopyLogitEffect]:
    """Return the direct effects of heads. Empty if the unembedding cannot be read."""
    try:
        return direct_effects(model, corpus, heads)
    except HeadwiseError:
        return {}


def _ov_summary(model: ModelProtocol, head: HeadProfile, effects: Mapping[str, CopyLogitEffect]) -> OVSummary:
    score = ov_eigenvalue_scores(model, str(head.address))[str(head.address)]
    try:
        token_effects = tuple(top_context_token_effects(model, head)) if model.output is not None else ()
    except HeadwiseError:  # the logits are not a sum over heads
        token_effects = ()
    return OVSummary(score, copying_std(model.spec), token_effects, effects.get(str(head.address)))


def ov_summaries(model: ModelProtocol, profile: Profile) -> dict[str, OVSummary]:
    """Summarize the output of each head: OV eigenvalue score, direct effect, promoted and suppressed tokens."""
    effects = _attended_logit_effects(model)
    return {str(head.address): _ov_summary(model, head, effects) for head in profile}


def copying_std(spec: ModelSpec) -> float:
    """Return the standard deviation of the OV eigenvalue score over random weights."""
    return 1.5 / spec.attention.value_dim


def kv_siblings(spec: ModelSpec, head: Address) -> tuple[str, ...]:
    """Return the other heads that share the KV head of a head."""
    layer = spec.attention_at(head.layer_address)
    readers = layer.heads_of_kv[layer.kv_of_head[layer.head_ids.index(head.head)]]
    return tuple(str(head.layer_address.head_address(n)) for n in readers if n != head.head)


def nearest_heads(model: ModelProtocol, head: Address | None = None) -> dict[str, list[list[Any]]]:
    """Return the heads with the most similar attention as [head, nats], for all heads or for one.

    The distance is the Jensen–Shannon divergence on a few attention rows of the default corpus.
    """
    addresses = tuple(address for hook_point in reachable_hook_points(model) for address in hook_point.head_addresses)
    if len(addresses) < 2 or model.image_input is not None:  # heads are compared on texts
        return {}
    if head is not None and head not in addresses:
        return {}
    compared = addresses if head is None else (head,)
    sums, rows = np.zeros((len(compared), len(addresses))), 0
    with eval_mode(model), torch.no_grad():
        for samples, positions in sample_texts_and_query_positions(
            model, None, COMPARISON_SIZE["rows"], COMPARISON_SIZE["max_length"], len(addresses), 0
        ):
            maps = record_rows(model, samples, positions, set(addresses)).maps  # (H, rows, S + 1)
            flat = maps.flatten(1)
            sums += js_sums(flat) if head is None else js_sums_of_head(flat, addresses.index(head))
            rows += maps.shape[1]
    is_same = np.array([[a == b for b in addresses] for a in compared])
    distances = sums / rows + np.where(is_same, np.inf, 0.0)
    order = np.argsort(distances, axis=1, kind="stable")[:, : min(NUM_NEAREST, len(addresses) - 1)]
    return {str(a): [[str(addresses[j]), round6(distances[i, j])] for j in order[i]] for i, a in enumerate(compared)}


def composition_partners(
    model: ModelProtocol, head: Address | None = None
) -> dict[str, tuple[ComposedHead | None, ComposedHead | None]]:
    """Return the earlier head that a head reads most and the later head that reads it most, by weights, for all heads or one.

    The score is ‖OV[a] OV[b]‖ / ‖OV[a]‖‖OV[b]‖ with norm gains folded into the weights. The result is empty if the norms are
    not known, if heads differ in size, or if the computation is too large.
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
    sizes = (to_float64(x).square().sum((1, 2)).sqrt().cpu().numpy() for x in (output_factors, input_factors))
    output_norms, input_norms = sizes
    stream_positions = [(head.streams["o"], head.streams["v"]) for head in heads]
    is_earlier = np.array(
        [[a[0].name == b[1].name and a[0].order < b[1].order for b in stream_positions] for a in stream_positions]
    )
    squared_norms = _product_squared_norms(
        output_factors, input_factors, None if head is None else addresses.index(head)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        score = np.sqrt(squared_norms) / (output_norms[:, None] * input_norms)
    score = np.where(is_earlier & np.isfinite(score), score, -1.0)  # (H, H): a is read by b
    random_score = spec.width**-0.5

    def best_partner(row: np.ndarray) -> ComposedHead | None:
        index = int(np.argmax(row))
        return (
            ComposedHead(str(addresses[index]), float(row[index]), random_score)
            if row[index] > 2 * random_score
            else None
        )

    return {
        str(a): (best_partner(score[:, i]), best_partner(score[i]))
        for i, a in enumerate(addresses)
        if head in (None, a)
    }


def _product_squared_norms(left: torch.Tensor, right: torch.Tensor, head: int | None) -> np.ndarray:
    """Compute ‖left[a] right[b]‖² for all pairs, or only for the pairs with one head and 0 elsewhere, (H, H)."""
    if head is None:
        return pairwise_product_squared_norms(left, right)
    norms = np.zeros((len(left), len(right)))
    norms[head] = pairwise_product_squared_norms(left[head : head + 1], right)[0]
    norms[:, head] = pairwise_product_squared_norms(left, right[head : head + 1])[:, 0]
    return norms


def round6(value: float) -> float | None:
    """Round to six significant digits, which halves the size of the JSON. None if not finite."""
    return float(f"{value:.6g}") if np.isfinite(value) else None
