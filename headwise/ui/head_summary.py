"""One head's summary in plain sentences: what it does, how sure that is and against what, where it rests, what it writes,
what the model loses without it, what it could cost less,
and which heads it works with. Each sentence says which entry of `GLOSSARY`
tells how its numbers are made."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, NamedTuple

from headwise.analysis.ablation.sensitivity import QuantizationCost
from headwise.analysis.attribution.attended_token_effect import AttendedLogitEffect
from headwise.analysis.head_facts import AblationSummary, ComposedHead, HeadFacts, OVSummary, measure_head_facts
from headwise.analysis.metrics.batch_context import SPECIAL
from headwise.analysis.metrics.long_offsets import OUTSIDE_WINDOW, STREAMING_POLICY
from headwise.analysis.metrics.row_shape import FIRST_TOKEN, OUTPUT_SHARE, RELATIVE_ENTROPY
from headwise.analysis.roles.causal_effects import CausalEffect
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.prompt_roles import STREAMING_THRESHOLD, streaming_candidate_mask
from headwise.analysis.roles.roles import LEAD, SUPPRESSION_PROBE, RoleEvidence
from headwise.compression.head_cost import CACHE_TOKENS, CompressionCostSummary, measure_compression_cost
from headwise.compression.streaming_cost import BOUND
from headwise.model import ModelProtocol
from headwise.progress import Progress
from headwise.ui.glossary import GLOSSARY, docs_anchor
from headwise.ui.role_descriptions import describe_role

# idle pattern: its name, the metric it is read off, and a sentence about the value of the metric
IDLE_PATTERNS = {
    "sink": ("attention sink", FIRST_TOKEN.name, "on average {} of its weight lies on the first token"),
    "special token": ("special-token sink", SPECIAL, "on average {} of its weight lies on special tokens"),
    "broad": ("diffuse", RELATIVE_ENTROPY.name, "its entropy is {} of the largest possible"),
    "idle": ("inactive", OUTPUT_SHARE.name, "it writes {} of what its layer writes"),
}
LEVEL_SENTENCES = {
    "attention": "Whether it changes what the head writes was not shown (attention).",
    "value-weighted": "It stands as well when each look counts by the length of what it fetches; whether answers hang on it "
    "was not shown (value-weighted).",
    "causal": "And the role's answers hang on it, more than the same answers do where they are reached another way (causal).",
}
ONE_SET = "It stands as well when each look counts by the length of what it fetches."
LED = "And the lead of the name due over the other name hangs on it (causal)."
PART_LABELS = {"qk": "W_Q and W_K", "vo": "W_V and W_O", "keys": "its cached keys", "values": "its cached values"}
COSINE = "1 − cosine"  # of a model without output
MAX_FURTHER_ROLES = 2  # roles told in full beside the first


class SummaryLine(NamedTuple):
    """One sentence, and the word that says how its numbers are made."""

    term: str
    text: str


@dataclass(frozen=True)
class HeadSummary:
    """All that is told of one head: as text, or in a notebook with a pointer behind each sentence."""

    lines: tuple[SummaryLine, ...]

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def _repr_html_(self) -> str:
        items = (
            f'<li>{escape(line.text)} <small title="{escape(GLOSSARY[line.term].meaning)}">'
            f"<code>{escape(docs_anchor(line.term))}</code></small></li>"
            for line in self.lines
        )
        return f"<ul>{''.join(items)}</ul>"


def describe(
    model: ModelProtocol,
    head: str,
    corpus: Any = None,
    *,
    prompts: bool = False,
    progress: Progress | None = None,
) -> HeadSummary:
    """Describe one head in sentences: its roles with their evidence, its output, its importance and its costs.

    Args:
        model: The model.
        head: Address of the head, such as `"5.1"`.
        corpus: A text, a list of texts, a path or a `Corpus`. None is the embedded probe set.
        prompts: Test the roles that need prompts of their own as well.
        progress: Called with stage, done and total.
    """
    model.heads[head]  # an unknown address raises before the work begins
    full_profile = profile(model, corpus, prompts=prompts, progress=progress)
    head_profile = full_profile[head]
    facts = measure_head_facts(model, head_profile, corpus, progress)
    cost = measure_compression_cost(model, head_profile, corpus, progress)
    return HeadSummary(tuple(summary_lines(full_profile, head_profile, facts, cost)))


def summarize_head(profile: Profile, head: HeadProfile, model: ModelProtocol | None = None) -> HeadSummary:
    """The summary of a head; with its model all that can be asked of it in a minute or so."""
    if model is None:
        return HeadSummary(tuple(summary_lines(profile, head)))
    return HeadSummary(
        tuple(summary_lines(profile, head, measure_head_facts(model, head), measure_compression_cost(model, head)))
    )


def summary_lines(
    profile: Profile, head: HeadProfile, facts: HeadFacts | None = None, cost: CompressionCostSummary | None = None
) -> list[SummaryLine]:
    """The sentences, in the order of the questions people ask."""
    facts, cost = facts or HeadFacts(), cost or CompressionCostSummary()
    return [
        *_role_lines(profile, head),
        _idle_line(head),
        *_streaming_lines(head),
        *_output_lines(facts.ov_summary),
        *_ablation_lines(facts.ablation),
        *_cost_lines(facts, cost),
        *_streams(profile, head, cost),
        *_partner_lines(facts),
    ]


def _role_lines(profile: Profile, head: HeadProfile) -> Iterator[SummaryLine]:
    on_images = bool(profile.metadata.get("image_grid"))
    if not head.roles:
        yield SummaryLine(
            "unclear",
            f"Head {head.address}: nothing found. On {profile.metadata['texts']:,} {'pictures' if on_images else 'texts'} no "
            "role of it stood above its baseline by the margin of the role, with p < 0.05; "
            f"{profile.family_size:,} tests were made over all heads and roles. Models with random weights "
            f"throughout give this "
            "answer for all heads; a trained model with random attention need not, because tests are over texts and not over "
            "draws of weights.",
        )
        return
    yield SummaryLine("role", f"Head {head.address} {describe_role(head.roles[0], pictures=on_images)}.")
    yield SummaryLine(
        "evidence",
        f"{_describe_test(head.roles[0], profile.family_size)} {_level(head.roles[0])}{_effects(head.roles[0])}",
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
            f"For example ([x] looks, *y* is looked at hardest): {example.text} ({example.weight:.2f}). Of "
            f"{len(head.examples)} "
            f"held-out cases kept as examples {hits} {'is a hit' if hits == 1 else 'are hits'}.",
        )


def _further_roles(described: Sequence[RoleEvidence], further: Sequence[RoleEvidence]) -> Iterator[SummaryLine]:
    """One sentence per evidence level. Roles of one level passed the same tests and differ in how far they are above their
    baselines."""
    for level, group in groupby(further, key=lambda evidence: evidence.evidence_level):
        roles = list(group)
        same_level = [evidence.gain for evidence in described if evidence.evidence_level == level]
        p = f"p up to {max(evidence.p for evidence in roles):.2g}"
        where = f"at the same evidence level ({level}, {p})" if same_level else f"at the evidence level {level} ({p})"
        if same_level and max(evidence.gain for evidence in roles) < min(same_level):
            where += ", less far above their baselines"
        labels = [f"{evidence.role} {evidence.detail}".rstrip() for evidence in roles]
        scores = [f"{_percent(evidence.score)} (baseline {_percent(evidence.baseline)})" for evidence in roles]
        listed = ", ".join(f"{label} {score}" for label, score in zip(labels, scores, strict=True))
        yield SummaryLine("role", f"Further roles {where}: {listed}.")


def _describe_test(evidence: RoleEvidence, family: int) -> str:
    corpus_note = f" ({evidence.corpus_label})" if evidence.corpus_label else ""
    return (
        f"Measured on {evidence.rows:,} held-out cases{corpus_note}: {_format_interval(evidence)}; its baseline "
        f"has {_percent(evidence.baseline)}; p = {evidence.p:.2g} "
        f"after correction for {evidence.family_size or family:,} tests."
    )


def _format_interval(evidence: RoleEvidence) -> str:
    return f"95 % CI {_percent(evidence.interval[0])} to {_percent(evidence.interval[1])}"


def _level(evidence: RoleEvidence) -> str:
    """Evidence level in a sentence; a causal level names the token sets or prompts of its test."""
    if not evidence.causal_on:
        return LEVEL_SENTENCES[evidence.evidence_level]
    sets = " and ".join(evidence.causal_on)
    if evidence.evidence_level != "causal":
        return f"{ONE_SET} Answers hang on it on {sets} alone ({evidence.evidence_label})."
    return f"{LED if evidence.probe == LEAD else LEVEL_SENTENCES[evidence.evidence_level]} It was tested on {sets}."


def _effects(evidence: RoleEvidence) -> str:
    """Costs of ablating the head on each token set, so far as they were asked for."""
    return "".join(_describe_effect(evidence, effect) for effect in evidence.effects)


def _describe_effect(evidence: RoleEvidence, effect: CausalEffect) -> str:
    change = {SUPPRESSION_PROBE: "what it holds back gains", LEAD: "the lead of the name due loses"}
    text = (
        f" On {effect.corpus_label}, without what it says of a case "
        f"{change.get(evidence.probe or '', 'the test of its role loses')} "
    )
    text += f"{effect.cost:+.3f} nats an answer"
    if effect.control_cost is None:
        return f"{text}; nowhere were the same answers found reached another way."
    text += f", and {effect.control_cost:+.3f} where the same answers are reached another way"
    if effect.single_name_cost is not None:
        text += f" and {effect.single_name_cost:+.3f} in sentences that name one person"
    if effect.effect is None or effect.effect_interval is None:
        return f"{text}."
    low, high = effect.effect_interval
    return f"{text}; {effect.effect:+.3f} more than without others of its layer (95 % CI {low:+.3f} to {high:+.3f})."


def _streaming_lines(head: HeadProfile) -> Iterator[SummaryLine]:
    value = head.metrics.get(OUTSIDE_WINDOW.name, math.nan)
    if math.isfinite(value):
        yield SummaryLine(
            "outside window",
            f"{_small_share(value)} of its attention falls outside {STREAMING_POLICY.sink_tokens} sink tokens "
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
            f"Looking at {effect.token!r} it makes {_format_tokens(effect.promotes)} likelier, "
            f"{_format_tokens(effect.suppresses)} less likely.",
        )


def _attended_logit(effect: AttendedLogitEffect) -> str:
    """How a head changes the logit of the token it attends to most."""
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
    importance, method = (
        ablation.importance,
        f"{ablation.ablation} ablation" if ablation.ranking == "ablation" else ablation.ranking,
    )
    significance_note = ", not told apart from nothing" if importance.low <= 0 <= importance.high else ""
    loss_text = f"the model loses {importance.importance:.2g} {ablation.unit}"
    if ablation.unit == COSINE:
        loss_text = f"what the model gives of a text turns by {importance.importance:.2g}, in {COSINE}"
    text = f"Without it {loss_text} (95 % CI {importance.low:.2g} to {importance.high:.2g}{significance_note})"
    if math.isfinite(importance.above_layer):
        text += f", {importance.above_layer:+.2g} beside an average other head of its layer"
    yield SummaryLine(
        "importance", f"{text}; {method} on {ablation.texts:,} texts. Later heads may take over a part of its work."
    )


def _cost_lines(facts: HeadFacts, cost: CompressionCostSummary) -> Iterator[SummaryLine]:
    sharing_note = f", with {_join_heads(facts.kv_siblings)}, which share its keys" if facts.kv_siblings else ""
    if cost.costs:
        changes = ", ".join(
            f"{PART_LABELS[item.part]} {_format_cost(item)}" for item in cost.costs if item.bits == cost.costs[0].bits
        )
        yield SummaryLine(
            "bits",
            f"Stored at {cost.costs[0].bits} bits{sharing_note}, the loss changes by: {changes} ({cost.unit}, "
            f"{cost.texts:,} texts).",
        )
    if cost.cache_bytes:
        yield SummaryLine(
            "cache",
            f"Its key head {cost.kv_head} keeps {cost.cache_bytes / 1e6:.1f} MB of keys and values at "
            f"{CACHE_TOKENS:,} tokens{sharing_note}.",
        )


def _streams(profile: Profile, head: HeadProfile, cost_summary: CompressionCostSummary) -> Iterator[SummaryLine]:
    """Measured loss with the KV head streaming; a recommendation only if attention and every kind of text allow it."""
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
            f"{STREAMING_THRESHOLD:.0%} of the head's attention falls outside."
        )
    yield SummaryLine("streaming", text)


def _format_cost(cost: QuantizationCost) -> str:
    return f"{cost.loss_increase:+.2g} (95 % CI {cost.low:+.2g} to {cost.high:+.2g})"


def _partner_lines(facts: HeadFacts) -> Iterator[SummaryLine]:
    sentences = []
    if facts.kv_siblings:
        sentences.append(f"It shares keys and values with {_join_heads(facts.kv_siblings)}.")
    if facts.reads_from is not None:
        sentences.append(f"Of what earlier heads write it reads {_format_partner(facts.reads_from)} most.")
    if facts.read_by is not None:
        sentences.append(f"Of later heads {_format_partner(facts.read_by)} reads it most.")
    if facts.similar_heads:
        sentences.append(
            f"It looks most like {facts.similar_heads[0][0]} ({facts.similar_heads[0][1]:.2g} nats apart)."
        )
    if sentences:
        yield SummaryLine("partners", " ".join(sentences))


def _format_partner(partner: ComposedHead) -> str:
    return f"{partner.head} (V-composition {partner.score:.2f}, random weights {partner.random_score:.2f})"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def _small_share(value: float) -> str:
    return "Less than 0.01%" if 0 < value < 1e-4 else f"{100 * value:.2g}%"


def _join_heads(heads: tuple[str, ...]) -> str:
    return heads[0] if len(heads) == 1 else f"{', '.join(heads[:-1])} and {heads[-1]}"
