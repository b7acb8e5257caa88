"""Facts about heads beside their profile: their output, their importance, and which heads they resemble and work with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwise.analysis.ablation.head_outputs import eval_corpus
from headwise.analysis.ablation.importance import HeadImportance, Importance, importance
from headwise.analysis.attribution.attended_token_effect import AttendedLogitEffect, direct_effects
from headwise.analysis.attribution.ov_analysis import TokenEffects, copying_scores, top_context_token_effects
from headwise.analysis.recording.batching import reachable_hook_points
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.similarity.attention_similarity import js_sums, record_rows, sample_row_positions
from headwise.analysis.similarity.weight_similarity import (
    compress_product_columns,
    compress_product_rows,
    fold_norms_into_heads,
    pairwise_product_squared_norms,
)
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, eval_mode
from headwise.progress import Progress
from headwise.spec import Address, ModelSpec

COMPARISON_SIZE = {"rows": 64, "max_length": 64}  # what heads are compared on
NUM_NEAREST = 5  # heads that look alike, of each
MAX_MULTIPLICATIONS = (
    2e12  # multiplications for all compositions; beyond that they are left out, for they would take minutes
)
ABLATION_TEXTS = 32  # texts one head is taken away on


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
    kv_siblings: tuple[str, ...] = ()  # heads that read the same keys
    reads_from: ComposedHead | None = None
    read_by: ComposedHead | None = None
    similar_heads: tuple[tuple[str, float], ...] = ()  # heads that look alike, nearest first, in nats
    errors: tuple[str, ...] = ()  # why something could not be found out


def measure_head_facts(
    model: ModelProtocol, head_profile: HeadProfile, corpus: Any = None, progress: Progress | None = None
) -> HeadFacts:
    """Measure one head in about a minute: read its weights, ablate it, compare it with other heads."""
    address, errors, ov_summary, ablation = str(head_profile.address), [], None, None
    try:
        ov_summary = _ov_summary(model, head_profile, _effects(model, corpus, address))
    except HeadwiseError as error:  # an encoder promotes no words, for example
        errors.append(str(error))
    try:
        # an encoder-decoder would need pairs, which a profile has not read: that is refused
        tokenized = eval_corpus(model, corpus, None).first(ABLATION_TEXTS)
        layer_heads = f"{head_profile.address.layer_address}.*"
        ablation = ablation_summary(model, importance(model, tokenized, heads=layer_heads, progress=progress), address)
    except HeadwiseError as error:
        errors.append(str(error))
    reads_from, read_by = composition_partners(model).get(address, (None, None))
    similar = nearest_heads(model).get(address, [])
    return HeadFacts(
        ov_summary, ablation, kv_siblings(model.spec, head_profile.address), reads_from, read_by,
        tuple((str(other), float(distance)) for other, distance in similar), tuple(dict.fromkeys(errors)),
    )  # fmt: skip


def collect_facts(
    model: ModelProtocol, profile: Profile, head_importance: Importance | None = None
) -> dict[str, HeadFacts]:
    """Collect facts of all heads of a profile, by address; without `head_importance` nothing is known of ablation."""
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
    unit = "nats a token" if model.output is not None else "1 − cosine"
    return AblationSummary(
        head_importance[head], head_importance.ranking, head_importance.ablation, unit, head_importance.texts
    )


def _effects(model: ModelProtocol, corpus: Any = None, heads: str = "*") -> dict[str, AttendedLogitEffect]:
    """Direct effects of heads; none if the model has no unembedding that can be read."""
    try:
        return direct_effects(model, corpus, heads)
    except HeadwiseError:
        return {}


def _ov_summary(model: ModelProtocol, head: HeadProfile, effects: Mapping[str, AttendedLogitEffect]) -> OVSummary:
    score = copying_scores(model, str(head.address))[str(head.address)]
    try:
        token_effects = tuple(top_context_token_effects(model, head)) if model.output is not None else ()
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


def kv_siblings(spec: ModelSpec, head: Address) -> tuple[str, ...]:
    """The other heads that read the same keys."""
    layer = spec.attention_at(head.layer_address)
    readers = layer.heads_of_kv[layer.kv_of_head[layer.head_ids.index(head.head)]]
    return tuple(str(head.layer_address.head_address(n)) for n in readers if n != head.head)


def nearest_heads(model: ModelProtocol) -> dict[str, list[list[Any]]]:
    """The heads that look most alike, by Jensen–Shannon divergence on a few rows of the probe set: [head, nats]."""
    addresses = tuple(address for hook_point in reachable_hook_points(model) for address in hook_point.head_addresses)
    if len(addresses) < 2 or model.image_input is not None:  # heads are compared on texts
        return {}
    sums, rows = np.zeros((len(addresses),) * 2), 0
    with eval_mode(model), torch.no_grad():
        for samples, positions in sample_row_positions(
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
        score = np.sqrt(pairwise_product_squared_norms(output_factors, input_factors)) / (
            output_norms[:, None] * input_norms
        )
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
