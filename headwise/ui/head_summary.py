"""Summary of one head in sentences: roles with their evidence, idle pattern, output, importance, compression cost and
related heads. Each sentence names the entry of `GLOSSARY` that explains its numbers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

from headwise.analysis.ablation.quantization_sensitivity import QuantizationCost
from headwise.analysis.attribution.copy_logit_effect import CopyLogitEffect
from headwise.analysis.head_facts import (
    AblationSummary,
    ComposedHead,
    HeadFacts,
    OVSummary,
    measure_head_facts,
    measure_related_heads,
)
from headwise.analysis.load_or_measure import profile_with_head_causal_test
from headwise.analysis.metrics.batch_context import SPECIAL
from headwise.analysis.metrics.far_attention import OUTSIDE_WINDOW, STREAMING_POLICY
from headwise.analysis.metrics.row_shape import FIRST_TOKEN, OUTPUT_SHARE, RELATIVE_ENTROPY
from headwise.analysis.roles.causal_test_results import CausalEffect
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.prompt_role_definitions import STREAMING_THRESHOLD, streaming_candidate_mask
from headwise.analysis.roles.roles import LEAD, SUPPRESSION_PROBE, RoleEvidence
from headwise.compression.head_compression_cost import CACHE_TOKENS, HeadCompressionCost, measure_head_compression_cost
from headwise.compression.streaming_loss_evaluator import BOUND
from headwise.io.result_store import ResultStore
from headwise.model import ModelProtocol
from headwise.progress import Progress, ProgressOption, callback_of, shows_progress
from headwise.spec import Address
from headwise.ui.glossary import GLOSSARY, docs_anchor
from headwise.ui.role_descriptions import describe_role

# idle pattern: its name, the metric that defines it, and a phrase with the value of the metric
IDLE_PATTERNS = {
    "sink": ("attention sink", FIRST_TOKEN.name, "on average {} of its attention is on the first token"),
    "special token": ("special-token sink", SPECIAL, "on average {} of its attention is on special tokens"),
    "broad": ("diffuse", RELATIVE_ENTROPY.name, "its entropy is {} of the maximum"),
    "idle": ("inactive", OUTPUT_SHARE.name, "its share of its layer's output is {}"),
}
VALUE_WEIGHTED = "Still above the baseline when attention is weighted by value norms."
NOT_VALUE_WEIGHTED = "Not confirmed when attention is weighted by value norms."
CAUSAL = "Causal effect confirmed: ablation costs more on the role's answers than on the same answers in control cases."
CAUSAL_LEAD = "Causal effect confirmed: ablation reduces the lead of the correct name over the other name."
# probe: the quantity that an ablation costs
COST_LABELS = {
    SUPPRESSION_PROBE: "rise in log-probability of the suppressed tokens",
    LEAD: "drop in the lead of the correct name",
}
COST_LABEL = "rise in the loss of the role's answers"
PART_LABELS = {"qk": "W_Q and W_K", "vo": "W_V and W_O", "keys": "its cached keys", "values": "its cached values"}
COSINE = "1 − cosine"  # unit of importance in a model without an output layer
MAX_FURTHER_ROLES = 2  # roles described in full after the first one


class SummaryLine(NamedTuple):
    """One sentence, and the glossary entry that explains its numbers."""

    term: str
    text: str


@dataclass(frozen=True)
class HeadSummary:
    """Summary of one head. `print(summary)` shows one sentence per line; a notebook adds a link to the docs to each.

    Attributes:
        lines: Sentences in order, each with its glossary entry.
    """

    lines: tuple[SummaryLine, ...]

    def __repr__(self) -> str:
        from headwise.ui.result_text import head_summary_text

        return head_summary_text(self)

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def _repr_html_(self) -> str:
        items = (
            f'<li>{escape(line.text)} <small title="{escape(GLOSSARY[line.term].meaning)}">'
            f"<code>{escape(docs_anchor(line.term))}</code></small></li>"
            for line in self.lines
        )
        return f"<ul>{''.join(items)}</ul>"


@dataclass(frozen=True)
class HeadDescription:
    """Measurements about one head, as far as they are finished.

    Attributes:
        profile: Profile of the model. None until it is measured.
        head: Profile of the head. None until it is measured.
        facts: Facts in addition to the profile.
        cost: Costs of compressing the head.
    """

    profile: Profile | None
    head: HeadProfile | None
    facts: HeadFacts
    cost: HeadCompressionCost

    @property
    def lines(self) -> list[SummaryLine]:
        """Sentences about the measurements that are finished."""
        if self.profile is None or self.head is None:
            return list(_partner_lines(self.facts))
        return summary_lines(self.profile, self.head, self.facts, self.cost)

    @property
    def errors(self) -> tuple[str, ...]:
        """Reasons why parts could not be measured."""
        return (*self.facts.errors, *self.cost.errors)


@shows_progress
def describe(
    model: ModelProtocol,
    head: str,
    corpus: Any = None,
    *,
    prompts: bool = False,
    store: bool = True,
    progress: ProgressOption = None,
) -> HeadSummary:
    """Describe one head in sentences: its roles with their evidence, its output, its importance and its costs.

    Args:
        model: The model.
        head: Address of the head, such as `"5.1"`.
        corpus: A text, a list of texts, a path or a `Corpus`. None uses the embedded probe set.
        prompts: Whether to test the roles that are defined on prompts of their own as well.
        store: Whether to read results from the store on disk, and to keep new ones there (`headwise store`).
        progress: Function called with stage, done and total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        The summary. Measurements that the model does not support are left out.

    Raises:
        HeadwiseError: If the model has no such head.
    """
    progress = callback_of(progress)
    result_store = ResultStore() if store else None
    *_, description = describe_steps(model, head, corpus, prompts=prompts, store=result_store, progress=progress)
    return HeadSummary(tuple(description.lines))


def describe_steps(
    model: ModelProtocol,
    head: str,
    corpus: Any = None,
    *,
    prompts: bool = False,
    store: ResultStore | None = None,
    progress: Progress | None = None,
) -> Iterator[HeadDescription]:
    """Yield the description of a head after each measurement: related heads, profile, output and importance, costs."""
    address = Address.parse(head)
    model.heads[head]  # an unknown address raises before the work begins
    facts, cost = measure_related_heads(model, address), HeadCompressionCost()
    yield HeadDescription(None, None, facts, cost)
    full_profile = profile_with_head_causal_test(
        model, address, corpus, store=store, prompts=prompts, progress=progress
    )
    head_profile = full_profile[head]
    yield HeadDescription(full_profile, head_profile, facts, cost)
    facts = measure_head_facts(model, head_profile, corpus, progress, related=facts, store=store)
    yield HeadDescription(full_profile, head_profile, facts, cost)
    cost = measure_head_compression_cost(model, head_profile, corpus, progress)
    yield HeadDescription(full_profile, head_profile, facts, cost)


def summarize_head(profile: Profile, head: HeadProfile, model: ModelProtocol | None = None) -> HeadSummary:
    """Summarize a head of a profile. With the model, also measure its output, importance and costs (about a minute)."""
    if model is None:
        return HeadSummary(tuple(summary_lines(profile, head)))
    return HeadSummary(
        tuple(summary_lines(profile, head, measure_head_facts(model, head), measure_head_compression_cost(model, head)))
    )


def summary_lines(
    profile: Profile, head: HeadProfile, facts: HeadFacts | None = None, cost: HeadCompressionCost | None = None
) -> list[SummaryLine]:
    """Return the sentences about a head: roles, idle pattern, output, importance, costs, related heads."""
    facts, cost = facts or HeadFacts(), cost or HeadCompressionCost()
    return [
        *_role_lines(profile, head),
        _idle_line(head),
        *_streaming_lines(head),
        *_output_lines(facts.ov_summary),
        *_ablation_lines(facts.ablation),
        *_compression_cost_lines(facts, cost),
        *_streaming_test_line(profile, head, cost),
        *_partner_lines(facts),
    ]


def _role_lines(profile: Profile, head: HeadProfile) -> Iterator[SummaryLine]:
    on_images = bool(profile.metadata.get("image_grid"))
    if not head.roles:
        yield SummaryLine(
            "unclear",
            f"Head {head.address}: no role found. On {profile.metadata['texts']:,} {'images' if on_images else 'texts'}, no "
            f"role exceeded its baseline by the required margin with p < 0.05 ({profile.family_size:,} tests over all heads "
            "and roles). If all weights of a model are random, every head gets this result. If only the attention weights of "
            "a trained model are random, a head can still get a role, because the tests resample texts, not weights.",
        )
        return
    yield SummaryLine("role", f"Head {head.address} {describe_role(head.roles[0], pictures=on_images)}.")
    yield SummaryLine(
        "evidence",
        f"{_describe_held_out_test(head.roles[0], profile.family_size)} "
        f"{_evidence_level_sentence(head.roles[0])}{_effects(head.roles[0])}",
    )
    for item in head.roles[1 : 1 + MAX_FURTHER_ROLES]:
        described = describe_role(item, pictures=on_images)
        yield SummaryLine(
            "role",
            f"It also {described} ({item.evidence_label}; {_format_interval(item)}; baseline {_percent(item.baseline)}).",
        )
    yield from _further_roles(head.roles[: 1 + MAX_FURTHER_ROLES], head.roles[1 + MAX_FURTHER_ROLES :])
    if head.examples:
        hits = sum(item.hit for item in head.examples)
        example = next((item for item in head.examples if item.hit), head.examples[0])
        yield SummaryLine(
            "hit",
            f"Example ([x] is the query, *y* the key with the largest weight): {example.text} (weight on the target: "
            f"{example.weight:.2f}). {hits} of {len(head.examples)} stored held-out examples "
            f"{'is a hit' if hits == 1 else 'are hits'}.",
        )


def _further_roles(described: Sequence[RoleEvidence], further: Sequence[RoleEvidence]) -> Iterator[SummaryLine]:
    """List the remaining roles, one sentence per evidence level, with their distance to the baseline."""
    for level, group in groupby(further, key=lambda evidence: evidence.evidence_level):
        roles = list(group)
        same_level = [evidence.gain for evidence in described if evidence.evidence_level == level]
        p = f"p up to {max(evidence.p for evidence in roles):.2g}"
        where = f"at the same evidence level ({level}, {p})" if same_level else f"at evidence level {level} ({p})"
        if same_level and max(evidence.gain for evidence in roles) < min(same_level):
            where += ", closer to their baselines"
        labels = [f"{evidence.role} {evidence.detail}".rstrip() for evidence in roles]
        scores = [f"{_percent(evidence.score)} (baseline {_percent(evidence.baseline)})" for evidence in roles]
        listed = ", ".join(f"{label} {score}" for label, score in zip(labels, scores, strict=True))
        yield SummaryLine("role", f"Further roles {where}: {listed}.")


def _describe_held_out_test(evidence: RoleEvidence, family: int) -> str:
    corpus_note = f" ({evidence.corpus_label})" if evidence.corpus_label else ""
    return (
        f"Evaluated on {evidence.rows:,} held-out cases{corpus_note}: {_percent(evidence.score)} "
        f"({_format_interval(evidence)}), baseline {_percent(evidence.baseline)}, p = {evidence.p:.2g} "
        f"after correction for {evidence.family_size or family:,} tests."
    )


def _format_interval(evidence: RoleEvidence) -> str:
    low, high = (f"{100 * end:.0f}" for end in evidence.interval)
    return f"95% CI {low}–{high}%"


def _evidence_level_sentence(evidence: RoleEvidence) -> str:
    """Sentences for the evidence level. A causal effect is stated with the token sets or prompts of its test."""
    if evidence.evidence_level == "attention":
        return f"{NOT_VALUE_WEIGHTED} {_causal_sentence(evidence)}"
    return f"{VALUE_WEIGHTED} {_causal_sentence(evidence)}"


def _causal_sentence(evidence: RoleEvidence) -> str:
    sets = " and ".join(evidence.causal_on)
    if evidence.evidence_level == "causal":
        sentence = CAUSAL_LEAD if evidence.probe == LEAD else CAUSAL
        return f"{sentence} Tested on {sets}." if sets else sentence
    if sets:
        return f"Causal effect confirmed on {sets} only (evidence level: {evidence.evidence_label})."
    return "Causal effect not tested." if evidence.cost is None else "Causal effect not confirmed."


def _effects(evidence: RoleEvidence) -> str:
    """Costs of ablating the head, one sentence per token set of the causal test."""
    return "".join(_describe_effect(evidence, effect) for effect in evidence.effects)


def _describe_effect(evidence: RoleEvidence, effect: CausalEffect) -> str:
    text = (
        f" Cost of ablating the head on {effect.corpus_label}: {effect.cost:+.3f} nats per answer "
        f"({COST_LABELS.get(evidence.probe or '', COST_LABEL)})"
    )
    if effect.control_cost is None:
        return f"{text}; no control cases with the same answers were found."
    text += f", {effect.control_cost:+.3f} on the same answers in control cases"
    if effect.single_name_cost is not None:
        text += f", {effect.single_name_cost:+.3f} in sentences with one name"
    if effect.effect is None or effect.effect_interval is None:
        return f"{text}."
    low, high = effect.effect_interval
    return f"{text}; {effect.effect:+.3f} relative to the other heads of its layer (95% CI {low:+.3f} to {high:+.3f})."


def _streaming_lines(head: HeadProfile) -> Iterator[SummaryLine]:
    value = head.metrics.get(OUTSIDE_WINDOW.name, math.nan)
    if math.isfinite(value):
        yield SummaryLine(
            "outside window",
            f"{_small_share(value)} of its attention is outside {STREAMING_POLICY.sink_tokens} sink tokens "
            f"and a window of {STREAMING_POLICY.window} "
            f"tokens (on {OUTSIDE_WINDOW.corpus_label}).",
        )


def _idle_line(head: HeadProfile) -> SummaryLine:
    if not head.idle_pattern:
        first_token_weight = head.metrics.get(FIRST_TOKEN.name, math.nan)
        value = (
            f"; {IDLE_PATTERNS['sink'][2].format(_percent(first_token_weight))}"
            if math.isfinite(first_token_weight)
            else ""
        )
        return SummaryLine("idle pattern", f"Idle pattern: none{value}.")
    patterns = []
    for name in head.idle_pattern:
        pattern, metric, sentence = IDLE_PATTERNS[name]
        value = head.metrics.get(metric, math.nan)
        patterns.append(f"{pattern}, {sentence.format(_percent(value))}" if math.isfinite(value) else pattern)
    return SummaryLine("idle pattern", f"Idle pattern: {'; '.join(patterns)}.")


def _output_lines(ov_summary: OVSummary | None) -> Iterator[SummaryLine]:
    if ov_summary is None:
        return
    if ov_summary.effect is not None:
        yield SummaryLine("direct effect", _attended_logit(ov_summary.effect))
    if ov_summary.token_effects:
        effect = ov_summary.token_effects[0]
        yield SummaryLine(
            "output",
            f"Attending to {effect.token!r} promotes {_format_tokens(effect.promotes)} and suppresses "
            f"{_format_tokens(effect.suppresses)} (computed from the token's embedding alone).",
        )


def _attended_logit(effect: CopyLogitEffect) -> str:
    """Describe the direct effect of a head on the logit of the token it attends to most."""
    size = f"95% CI {effect.low:+.2f} to {effect.high:+.2f}"
    claim = (
        f"Its output does not measurably change the logit of the token it attends to most ({effect.mean:+.2f}; {size})"
    )
    if effect.sign:
        verb = "raises" if effect.sign > 0 else "lowers"
        claim = f"Its output {verb} the logit of the token it attends to most by {abs(effect.mean):.2f} ({size})"
    return (
        f"{claim}, relative to the mean over the vocabulary: direct effect at {effect.queries:,} query positions of "
        f"{effect.texts:,} texts, {100 * effect.share:.2g}% of all; at the others it attends most to the first token or to a "
        "special token."
    )


def _format_tokens(scored_tokens: list[tuple[str, float]]) -> str:
    return ", ".join(repr(token) for token, _ in scored_tokens[:3])


def _ablation_lines(ablation: AblationSummary | None) -> Iterator[SummaryLine]:
    if ablation is None:
        return
    importance = ablation.importance
    significance_note = ", not significantly different from 0" if importance.low <= 0 <= importance.high else ""
    interval = f"(95% CI {importance.low:+.2g} to {importance.high:+.2g}{significance_note})"
    if ablation.ranking != "ablation":
        text, method = f"Importance: {importance.importance:+.2g} {interval}", ablation.ranking
    else:
        output = "output vector of a text" if ablation.unit == COSINE else "loss"
        unit = f"in {COSINE}" if ablation.unit == COSINE else _format_unit(ablation.unit)
        text = f"Ablating it changes the {output} by {importance.importance:+.2g} {unit} {interval}"
        method = f"{ablation.ablation} ablation"
    if math.isfinite(importance.above_layer):
        text += f", {importance.above_layer:+.2g} relative to the other heads of its layer"
    yield SummaryLine(
        "importance", f"{text}; {method} on {ablation.texts:,} texts. Later heads may compensate in part."
    )


def _format_unit(unit: str) -> str:
    """Unit of a loss, for example `nats per token`."""
    return unit.replace(" a ", " per ")


def _compression_cost_lines(facts: HeadFacts, cost: HeadCompressionCost) -> Iterator[SummaryLine]:
    siblings = _join_heads(facts.kv_siblings) if facts.kv_siblings else ""
    if cost.costs:
        changes = ", ".join(
            f"{PART_LABELS[item.part]} {_format_loss_increase(item)}"
            for item in cost.costs
            if item.bits == cost.costs[0].bits
        )
        sharing_note = f", together with {siblings} (same KV head)" if siblings else ""
        yield SummaryLine(
            "bits",
            f"Loss increase if one part is quantized to {cost.costs[0].bits} bits{sharing_note}: {changes}; "
            f"{_format_unit(cost.unit)}, {cost.texts:,} texts.",
        )
    if cost.cache_bytes:
        sharing_note = f", shared with {siblings}" if siblings else ""
        yield SummaryLine(
            "cache",
            f"KV cache: {cost.cache_bytes / 1e6:.1f} MB at {CACHE_TOKENS:,} tokens (KV head {cost.kv_head}{sharing_note}).",
        )


def _streaming_test_line(
    profile: Profile, head: HeadProfile, cost_summary: HeadCompressionCost
) -> Iterator[SummaryLine]:
    """State the loss with the KV head streaming. Recommend it only if attention and every kind of text allow it."""
    if cost_summary.streaming_cost is None or not cost_summary.streaming_cost.costs:
        return
    test, local = cost_summary.streaming_cost, streaming_candidate_mask(profile.accumulator)
    costs = "; ".join(
        f"{cost.kind} {cost.full_loss:.2f} {cost.loss_increase.mean:+.2g} "
        f"(95% CI {cost.loss_increase.low:+.2g} to {cost.loss_increase.high:+.2g}; "
        f"{cost.texts:,} texts)"
        for cost in test.costs
    )
    text = (
        f"Loss in nats per token, and its increase with KV head {cost_summary.kv_head} at "
        f"{test.policy.sink_tokens} sink tokens and a window "
        f"of {test.policy.window}: {costs}."
    )
    if test.passed and local is not None and local[profile.addresses.index(head.address)]:
        text += (
            f" KV head {cost_summary.kv_head} can stream: every increase is below {BOUND:g} (upper end of the "
            f"CI), and less than "
            f"{STREAMING_THRESHOLD:.0%} of the head's attention is outside."
        )
    yield SummaryLine("streaming", text)


def _format_loss_increase(cost: QuantizationCost) -> str:
    return f"{cost.loss_increase:+.2g} (95% CI {cost.low:+.2g} to {cost.high:+.2g})"


def _partner_lines(facts: HeadFacts) -> Iterator[SummaryLine]:
    sentences = []
    if facts.kv_siblings:
        sentences.append(f"It shares its KV head with {_join_heads(facts.kv_siblings)}.")
    if facts.reads_from is not None:
        sentences.append(f"Strongest V-composition with an earlier head: {_format_partner(facts.reads_from)}.")
    if facts.read_by is not None:
        sentences.append(f"Strongest V-composition with a later head: {_format_partner(facts.read_by)}.")
    if facts.similar_heads:
        name, divergence = facts.similar_heads[0]
        sentences.append(f"Most similar attention: {name} (Jensen–Shannon divergence {divergence:.2g} nats).")
    if sentences:
        yield SummaryLine("partners", " ".join(sentences))


def _format_partner(partner: ComposedHead) -> str:
    return f"{partner.head} ({partner.score:.2f}, random weights {partner.random_score:.2f})"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f}%"


def _small_share(value: float) -> str:
    return "Less than 0.01%" if 0 < value < 1e-4 else f"{100 * value:.2g}%"


def _join_heads(heads: tuple[str, ...]) -> str:
    return f"head {heads[0]}" if len(heads) == 1 else f"heads {', '.join(heads[:-1])} and {heads[-1]}"
