"""Roles and the evidence levels of a head's role.

    none            the score exceeds its baseline by the role's threshold only on the selection half of the texts
    attention       the score exceeds it on the reporting half as well (max-T test over all heads, roles and directions)
    value-weighted  the score still exceeds it if attention is weighted by the norm of the value vectors
    causal          ablating the head costs the role's answers more than the same answers in controls, and more than ablating
                    other heads of its layer, on every tested token set (see causal_test.py)

A head whose roles all have level `none` is reported as `unclear`. Idle patterns are reported separately from roles.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.batch_context import SPECIAL, WINDOW
from headwise.analysis.metrics.directed_relations import (
    CONTROL_RELATIONS,
    CONTROL_SHAPES,
    CONTROLS,
    HITS,
    MATCHED,
    OTHERS,
    WORD_SETS,
    DirectedRelation,
)
from headwise.analysis.metrics.gold_arc_data import BASELINE_OFFSETS
from headwise.analysis.metrics.induction import DUPLICATE, INDUCTION
from headwise.analysis.metrics.metric import MetricSpec
from headwise.analysis.metrics.offsets import ELIGIBLE_SPECS, LOCAL_SPECS, LONG_RANGE_SPECS
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.row_shape import ENTROPY, FIRST_TOKEN, OUTPUT_SHARE, RELATIVE_ENTROPY
from headwise.analysis.metrics.statistics import MIN_UNITS, bootstrap_interval, max_t_test
from headwise.analysis.metrics.token_classes import CLASS_SPECS, CLASSES
from headwise.analysis.recording.text_hash_split import REPORTING, SELECTION, buckets_in_half
from headwise.analysis.roles.causal_test_results import CausalEffect
from headwise.errors import ArgumentError, suggest_names
from headwise.text.annotated_document import Document

# Probes: repeated tokens; repeated tokens that a head suppresses; prompts of the role, measured by answer or by lead.
REPEATS_PROBE, SUPPRESSION_PROBE, PROMPT_PROBE, LEAD = "repeats", "held back", "due", "lead"
EVIDENCE_LEVELS = ("none", "attention", "value-weighted", "causal")


@dataclass(frozen=True)
class Role:
    """A role of heads: the metric that is its score, and a threshold above the baseline.

    The gain (score − baseline) / (1 − baseline) must reach the threshold.

    Attributes:
        name: Name of the role.
        metric_spec: Metric of the score. It needs a baseline and a value-weighted metric over the same rows.
        threshold: Minimum gain, between 0 and 1.
        probe: Cases of the causal test: "repeats" (repeated tokens), "held back" (repeated tokens that the head suppresses),
            "due" or "lead" (prompts of the role, by answer or by lead), or the answer position of a relation. None skips the
            causal test.
        detail: Shown with the role, for example an offset or a direction.
        is_relation: Whether the role is measured on gold arcs.
        is_hit_rate: Whether the score is the fraction of rows whose target receives the largest attention weight.
        separate_family: Whether the role is measured on its own prompts and tested in a separate family.
    """

    name: str
    metric_spec: MetricSpec
    threshold: float
    probe: str | None = None
    detail: str = ""
    is_relation: bool = False
    is_hit_rate: bool = False
    separate_family: bool = False


def offset_role(offset: int) -> Role:
    """Return the role of heads that attend at a fixed offset, back or ahead."""
    names = {1: "previous token", -1: "next token", 0: "self"}
    probe = REPEATS_PROBE if offset == 1 else None
    return Role(
        names.get(offset, "fixed offset"),
        ELIGIBLE_SPECS[offset],
        0.3,
        probe,
        "" if offset in names else f"{-offset:+d}",
    )


DEFAULT_ROLES = (
    *(offset_role(offset) for offset in range(1 - WINDOW, WINDOW)),
    Role("local", LOCAL_SPECS[0], 0.4, None, "within 3"),
    *(Role(name, CLASS_SPECS[name], 0.3) for name in CLASSES if name != SPECIAL),
    Role("long range", LONG_RANGE_SPECS[0], 0.4, None, f"beyond {WINDOW}"),
    Role("induction", INDUCTION[0], 0.1, REPEATS_PROBE),
    Role("duplicate token", DUPLICATE[0], 0.1, REPEATS_PROBE),
)
MAX_BASELINE = 0.8  # roles with a higher baseline are not reported, because a small difference would be a large gain
RELATION_THRESHOLD = 0.1  # threshold of every relation, in accuracy above the best fixed offset
MIN_CONTROL_BUCKETS = 5  # minimum number of text buckets in each half for a control
MIN_EXCESS = 0.02  # minimum attention weight of arcs above other pairs at the same distance
# relation → position of the answer in the causal test
RELATION_PROBES = {
    "bracket": "later word", "quote": "later word", "copy": "later word", "if-then": "later word",
    "subject-verb": "later word", "nsubj": "later word", "pronoun-antecedent": "referent",
}  # fmt: skip
ROLE_OF_RELATION = {
    "related": "semantic",
    "pronoun-antecedent": "coreference",
    "coref": "coreference",
    "same class": "part of speech",
    "delimiter": "sentence end",  # a period attends to the previous one; "delimiter" is already a token class
}
SINGLE_OFFSET_ROLES = ("previous token", "next token", "self", "fixed offset")
IDLE_PATTERNS = ("sink", "special token", "broad", "idle")


@dataclass(frozen=True, eq=False)
class RoleScores:
    """Scores of one role for all heads: sums per bucket and head.

    Attributes:
        role: The role.
        scores: Summed scores, (buckets, heads).
        baselines: Summed baselines, (buckets, heads).
        value_weighted: Summed value-weighted scores, (buckets, heads).
        counts: Number of rows, (buckets, heads).
        coverage: Fraction of rows that could be compared on the reporting half, (heads,). None means all.
    """

    role: Role
    scores: np.ndarray
    baselines: np.ndarray
    value_weighted: np.ndarray
    counts: np.ndarray
    coverage: np.ndarray | None = None

    def gain(self, half: int, value_weighted: bool = False) -> np.ndarray:
        """Return (score − baseline) / (1 − baseline) on one half, (heads,). NaN without rows."""
        score, baseline = self.mean(half, value_weighted), self.baseline(half)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (score - baseline) / (1 - baseline)

    def mean(self, half: int, value_weighted: bool = False) -> np.ndarray:
        """Return the score on one half, (heads,)."""
        buckets = self.buckets_in_half(half)
        return _ratio((self.value_weighted if value_weighted else self.scores)[buckets], self.counts[buckets])

    def baseline(self, half: int) -> np.ndarray:
        """Return the baseline on one half, (heads,)."""
        buckets = self.buckets_in_half(half)
        return _ratio(self.baselines[buckets], self.counts[buckets])

    def buckets_in_half(self, half: int) -> np.ndarray:
        """Return the mask of buckets in a half, (buckets,)."""
        return buckets_in_half(self.counts, half)


@dataclass(frozen=True)
class RoleEvidence:
    """Evidence that one head has one role.

    Attributes:
        role: Name of the role.
        detail: Offset or direction of the role.
        evidence_level: `none`, `attention`, `value-weighted` or `causal`.
        score: Score on the reporting half.
        baseline: Baseline on the reporting half.
        interval: 95% confidence interval of the score.
        gain: (score − baseline) / (1 − baseline).
        p: Family-wise p-value of the score against the baseline.
        coverage: Fraction of rows that could have the target; for a relation, fraction of arcs that could be compared.
        probe: Cases of the causal test. None for a role without causal test.
        rows: Number of rows on the reporting half.
        effect: Cost of ablating the head, minus that of the other heads of its layer, in nats per answer.
        effect_interval: 95% confidence interval of `effect`.
        cost: Cost of ablating the head, in nats per answer.
        cost_threshold: Bound that `cost` must exceed.
        control_cost: Cost in the control texts. None without controls.
        excess_interval: 95% confidence interval of `cost` minus `control_cost`.
        mean_ablation_cost: Cost under mean ablation. None if an earlier condition failed.
        causal_p: Largest family-wise p-value over the token sets. None if no token set has controls.
        is_relation: Whether the role is measured on gold arcs.
        corpus_label: Texts on which the role was found.
        family_size: Number of tests for which p is corrected, if they are not those of the profile. Else 0.
        hits: Whether the score is the fraction of cases in which the target receives the largest weight.
        effects: Causal effect on each tested token set. The fields above are those of the first.
        causal_on: Token sets or prompts on which the causal test passes.
    """

    role: str
    detail: str
    evidence_level: str
    score: float
    baseline: float
    interval: tuple[float, float]
    gain: float
    p: float
    coverage: float
    probe: str | None
    rows: int
    effect: float | None = None
    effect_interval: tuple[float, float] | None = None
    cost: float | None = None
    cost_threshold: float | None = None
    control_cost: float | None = None
    excess_interval: tuple[float, float] | None = None
    mean_ablation_cost: float | None = None
    causal_p: float | None = None
    is_relation: bool = False
    corpus_label: str = ""
    family_size: int = 0
    hits: bool = False
    effects: tuple[CausalEffect, ...] = ()
    causal_on: tuple[str, ...] = ()

    def with_effects(self, effects: Sequence[CausalEffect], num_token_sets: int) -> "RoleEvidence":
        """Return the evidence with the results of its causal test.

        The level is causal only if the test passes on all `num_token_sets` token sets. `causal_on` names those that pass.
        """
        effects = tuple(
            effect if effect.corpus_label else replace(effect, corpus_label=self.corpus_label) for effect in effects
        )
        holds = tuple(effect.corpus_label for effect in effects if effect.is_causal)
        tried = [effect.p for effect in effects if effect.control_cost is not None]
        first = effects[0]
        return replace(
            self, evidence_level="causal" if len(holds) == num_token_sets else self.evidence_level, effect=first.effect,
            effect_interval=first.effect_interval, cost=first.cost, cost_threshold=first.cost_threshold,
            control_cost=first.control_cost, excess_interval=first.excess_interval,
            mean_ablation_cost=first.mean_ablation_cost, causal_p=max(tried) if tried else None, effects=effects,
            causal_on=holds,
        )  # fmt: skip

    def __repr__(self) -> str:
        from headwise.ui.result_text import role_evidence_text

        return role_evidence_text(self)

    @property
    def evidence_label(self) -> str:
        """Evidence level in words, with the token sets on which the causal test passes."""
        sets = " and ".join(self.causal_on)
        if not sets:
            return self.evidence_level
        return f"causal on {sets}" if self.evidence_level == "causal" else f"{self.evidence_level}; causal on {sets}"

    @property
    def is_supported(self) -> bool:
        """Whether the role is reported: its level is above `none`."""
        return self.evidence_level != EVIDENCE_LEVELS[0]

    @property
    def sort_key(self) -> tuple[int, float]:
        """Key by which roles are ranked: evidence level, then gain."""
        return EVIDENCE_LEVELS.index(self.evidence_level), self.gain


EvidencePerHead = Sequence[Sequence[RoleEvidence]]  # for each head, best first


def role_names(documents: Iterable[Document]) -> set[str]:
    """Return all roles that a head can have: the default ones, and those of the relations in the documents.

    >>> from headwise.text.annotated_document import Relation
    >>> sorted(role_names([Document.of(["it", "runs"], [Relation("subject-verb", 1, 0)])]) - role_names([]))
    ['subject-verb']
    """
    names = {arc.name for document in documents for arc in document.relations} | {*WORD_SETS}
    return {role.name for role in DEFAULT_ROLES} | {
        ROLE_OF_RELATION.get(name, name) for name in names - CONTROL_RELATIONS
    }


def check_roles(roles: Sequence[Role], metric_specs: Iterable[MetricSpec]) -> None:
    """Raise if additional roles are invalid or need metrics that are not measured."""
    measured = {spec.name for spec in metric_specs}
    used_names = {(role.name, role.detail) for role in DEFAULT_ROLES}
    for role in roles:
        metric_spec = role.metric_spec
        if not metric_spec.baseline or not metric_spec.value_weighted:
            missing = "baseline" if not metric_spec.baseline else "value-weighted variant"
            raise ArgumentError(
                f"roles: role {role.name!r} uses the metric {metric_spec.name!r}, which has no {missing}. The metric of a "
                f"role must have a baseline and a value-weighted variant. Use a metric with both."
            )
        if not {metric_spec.name, metric_spec.baseline, metric_spec.value_weighted} <= measured:
            raise ArgumentError(
                f"roles: role {role.name!r} needs the metric {metric_spec.name!r}, which is not measured. "
                f"Add it to metrics=[...]."
            )
        if (role.name, role.detail) in used_names:
            raise ArgumentError(
                f"roles: a role named {role.name!r} with detail {role.detail!r} already exists. "
                f"Choose another name or detail."
            )
        if not 0 < role.threshold < 1 or role.probe not in (
            None,
            REPEATS_PROBE,
            SUPPRESSION_PROBE,
            *[PROMPT_PROBE, LEAD] * role.separate_family,
        ):
            raise ArgumentError(
                f"roles: role {role.name!r} must have a threshold between 0 and 1 and the probe {REPEATS_PROBE!r}, "
                f"{SUPPRESSION_PROBE!r} or None. Got threshold {role.threshold} and probe {role.probe!r}."
            )
        used_names.add((role.name, role.detail))


def score(
    accumulator: Accumulator,
    relation_metric: RelationMetric | None,
    roles: Sequence[Role] = DEFAULT_ROLES,
    only_role: str | None = None,
) -> list[RoleScores]:
    """Return score, baseline and value-weighted score of every measured role, or of one role, for all heads."""
    all_scores = list(_metric_role_scores(accumulator, roles))
    if relation_metric is not None:
        all_scores += _relation_role_scores(accumulator, relation_metric)
    if only_role is not None:
        available = {scores.role.name for scores in all_scores}
        if only_role not in available:
            raise ArgumentError(f"role: {only_role!r} was not measured; {suggest_names(only_role, available)}")
        all_scores = [scores for scores in all_scores if scores.role.name == only_role]
    return all_scores


def assess(
    all_scores: Sequence[RoleScores], heads: int, metadata: Mapping[str, Any] | None = None
) -> tuple[list[list[RoleEvidence]], int]:
    """Select roles on one half of the texts and test them on the other.

    Args:
        all_scores: Scores of every role.
        heads: Number of heads.
        metadata: Metadata of the pass. It labels the evidence with the corpus and with the offset selected for a head.

    Returns:
        The evidence for the roles of each head, best first, and the number of tests. Roles of a separate family come after
        the others of their evidence level, so they do not change which of the other roles is reported and ablated.
    """
    first, second = (
        [scores for scores in all_scores if scores.role.separate_family == separate] for separate in (False, True)
    )
    evidence, family_size = _assess_family(first, heads)
    extra_evidence, extra_family_size = _assess_family(second, heads)
    merged = [
        [*head_evidence, *(replace(entry, family_size=extra_family_size) for entry in extra)]
        for head_evidence, extra in zip(evidence, extra_evidence, strict=True)
    ]
    unique = [_drop_duplicate_roles(sort_evidence(head_evidence)) for head_evidence in merged]
    if metadata is not None:
        unique = [
            [_add_corpus_and_detail(entry, head, metadata) for entry in entries] for head, entries in enumerate(unique)
        ]
    return unique, family_size


def _add_corpus_and_detail(evidence: RoleEvidence, head: int, metadata: Mapping[str, Any]) -> RoleEvidence:
    """Add the name of the corpus to the evidence of a head, and the offset or position that was selected for it."""
    corpus_label = evidence.corpus_label or metadata["relations_corpus" if evidence.is_relation else "corpus"]
    choices = metadata.get("chosen_offsets", {})
    detail = str(choices[evidence.role][head]) if evidence.role in choices else evidence.detail
    return replace(evidence, corpus_label=corpus_label, detail=detail)


def sort_evidence(evidence: Iterable[RoleEvidence]) -> list[RoleEvidence]:
    """Sort evidence, best first: by evidence level, then roles of the main family, then by gain."""
    return sorted(evidence, key=lambda entry: (entry.sort_key[0], not entry.family_size, entry.gain), reverse=True)


def _assess_family(all_scores: Sequence[RoleScores], heads: int) -> tuple[list[list[RoleEvidence]], int]:
    """Select and test the roles of one family."""
    if not all_scores:
        return [[] for _ in range(heads)], 0
    reporting = [role_scores.buckets_in_half(REPORTING) for role_scores in all_scores]
    scores, baselines, value_weighted, counts = (
        np.stack(
            [
                getattr(role_scores, name) * half[:, None]
                for role_scores, half in zip(all_scores, reporting, strict=True)
            ],
            -1,
        )
        for name in ("scores", "baselines", "value_weighted", "counts")
    )  # (buckets, heads, roles): 0 outside the reporting half
    p, family_size = max_t_test(scores, baselines, counts)
    p_value_weighted, _ = max_t_test(value_weighted, baselines, counts)
    evidence: list[list[RoleEvidence]] = [[] for _ in range(heads)]
    for index, (role_scores, half) in enumerate(zip(all_scores, reporting, strict=True)):
        role, row_counts = role_scores.role, role_scores.counts[half]  # (buckets, heads)
        selection_gain, reporting_gain = role_scores.gain(SELECTION), role_scores.gain(REPORTING)
        weighted_gain = role_scores.gain(REPORTING, value_weighted=True)
        has_enough = (row_counts > 0).sum(0) >= MIN_UNITS
        highest_baseline = np.maximum(role_scores.baseline(SELECTION), role_scores.baseline(REPORTING))
        below_max_baseline = highest_baseline <= MAX_BASELINE  # False for NaN
        selected = np.flatnonzero(
            (np.nan_to_num(selection_gain, nan=-1.0) >= role.threshold) & has_enough & below_max_baseline
        )
        if not len(selected):
            continue
        low, high = bootstrap_interval(role_scores.scores[half][:, selected], row_counts[:, selected])
        score, baseline = role_scores.mean(REPORTING), role_scores.baseline(REPORTING)
        rows = row_counts.sum(0)
        for i, head in enumerate(selected):
            level = 0
            if reporting_gain[head] >= role.threshold and p[head, index] < 0.05:
                level = 2 if weighted_gain[head] >= role.threshold / 2 and p_value_weighted[head, index] < 0.05 else 1
            evidence[head].append(
                RoleEvidence(
                    role.name, role.detail, EVIDENCE_LEVELS[level], float(score[head]), float(baseline[head]),
                    (float(low[i]), float(high[i])), float(reporting_gain[head]), float(p[head, index]),
                    1.0 if role_scores.coverage is None else float(role_scores.coverage[head]), role.probe, int(rows[head]),
                    is_relation=role.is_relation, corpus_label=role.metric_spec.corpus_label,
                    hits=role.is_hit_rate or role.metric_spec.hits,
                )
            )  # fmt: skip
    return evidence, family_size


def find_idle_patterns(accumulator: Accumulator, heads_in_layer: np.ndarray) -> list[tuple[str, ...]]:
    """Return the idle patterns of each head: first-token sink, special-token sink, uniform attention, or little output."""
    names = (FIRST_TOKEN.name, SPECIAL, RELATIVE_ENTROPY.name, OUTPUT_SHARE.name)
    missing = np.full(accumulator.heads, np.nan)  # images have no first token
    first, special, relative_entropy, output_share = (
        accumulator.mean(name) if name in accumulator.fields else missing for name in names
    )
    relative_output = output_share * heads_in_layer
    flags = np.stack((first > 0.3, (special > 0.3) & (first <= 0.3), relative_entropy > 0.9, relative_output < 0.2), -1)
    return [tuple(name for name, flag in zip(IDLE_PATTERNS, row, strict=True) if flag) for row in flags]


def _drop_duplicate_roles(evidence: list[RoleEvidence]) -> list[RoleEvidence]:
    """Keep each role once, in its best form. Drop `local` if a single offset explains nearly as much."""
    seen_roles: set[str] = set()
    unique = [entry for entry in evidence if not (entry.role in seen_roles or seen_roles.add(entry.role))]
    local = next((entry for entry in unique if entry.role == "local"), None)
    narrow = [
        entry
        for entry in unique
        if local
        and entry.role in SINGLE_OFFSET_ROLES
        and EVIDENCE_LEVELS.index(entry.evidence_level) >= EVIDENCE_LEVELS.index(local.evidence_level)
    ]
    if local and any(entry.gain >= 0.7 * local.gain for entry in narrow):
        unique.remove(local)
    return unique


def _metric_role_scores(accumulator: Accumulator, roles: Sequence[Role]) -> Iterator[RoleScores]:
    rows = accumulator.bucket_sums_and_counts(ENTROPY.name)[1] if ENTROPY.name in accumulator.fields else None
    for role in roles:
        metric_spec = role.metric_spec
        if metric_spec.name not in accumulator.fields:
            continue
        (scores, counts), (baselines, baseline_counts), (value_weighted, _) = map(
            accumulator.bucket_sums_and_counts, (metric_spec.name, metric_spec.baseline, metric_spec.value_weighted)
        )
        if counts.sum() == 0:
            continue
        with np.errstate(invalid="ignore", divide="ignore"):  # a baseline may have been measured on other texts
            rate = np.where(baseline_counts > 0, baselines / baseline_counts, 0.0)
        # tasks with their own texts use every row
        coverage = None if rows is None or metric_spec.corpus_label else _coverage(counts, rows)
        yield RoleScores(role, scores, rate * counts, value_weighted, counts, coverage)


def _relation_role_scores(accumulator: Accumulator, relation_metric: RelationMetric) -> Iterator[RoleScores]:
    for index, relation in enumerate(relation_metric.relations):
        name, direction, metric_specs = relation.relation, relation.direction, relation.metric_specs
        if name in CONTROL_RELATIONS or relation_metric.arcs[:, index].sum() == 0:
            continue
        metric_spec = metric_specs[MATCHED if name in WORD_SETS else HITS]
        role = Role(
            ROLE_OF_RELATION.get(name, name),
            metric_spec,
            RELATION_THRESHOLD,
            RELATION_PROBES.get(name),
            direction,
            is_relation=True,
            is_hit_rate=name not in WORD_SETS,
        )
        matched, matched_counts = accumulator.bucket_sums_and_counts(metric_specs[MATCHED].name)
        others = accumulator.bucket_sums_and_counts(metric_specs[OTHERS].name)[0]
        hits, counts = accumulator.bucket_sums_and_counts(metric_specs[HITS].name)
        coverage, value_weighted = (
            _coverage(matched_counts, counts),
            accumulator.bucket_sums_and_counts(metric_spec.value_weighted)[0],
        )
        if name in WORD_SETS:
            yield RoleScores(role, matched, others, value_weighted, matched_counts, coverage)
            continue
        baselines = _best_offset_hits(relation_metric, index)[:, None] * np.ones(accumulator.heads)
        for control_hits, control_rows in _iter_control_relation_hits(accumulator, relation_metric, relation):
            baselines = _larger_baseline(baselines, counts, control_hits, control_rows)
        selection_half = buckets_in_half(counts, SELECTION)
        excess = _ratio(matched[selection_half], matched_counts[selection_half]) - _ratio(
            others[selection_half], matched_counts[selection_half]
        )
        follows = np.nan_to_num(excess) >= MIN_EXCESS  # exactly 0 for a purely positional head
        yield RoleScores(role, hits * follows, baselines, value_weighted * follows, counts, coverage)


def _iter_control_relation_hits(
    accumulator: Accumulator, relation_metric: RelationMetric, relation: DirectedRelation
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the hits of each head on the words of each control of a relation: hits and rows, (buckets, heads) each."""
    ahead = relation_metric.offsets[:, relation_metric.relations.index(relation)].sum(0) @ np.sign(BASELINE_OFFSETS) > 0
    for control in CONTROLS.get(relation.relation, ()):
        back = "<" if ahead else ">"  # derived controls point back with >
        control_relation = DirectedRelation(control, relation.direction if control not in CONTROL_SHAPES else back)
        if control_relation in relation_metric.relations:
            hits, rows = accumulator.bucket_sums_and_counts(control_relation.metric_specs[HITS].name)
            if min(buckets_in_half(rows, half).sum() for half in (SELECTION, REPORTING)) >= MIN_CONTROL_BUCKETS:
                yield hits, rows


def _coverage(matched: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return the fraction of rows on the reporting half, (heads,)."""
    half = buckets_in_half(total, REPORTING)
    return np.nan_to_num(_ratio(matched[half], total[half]))


def _larger_baseline(
    baselines: np.ndarray, counts: np.ndarray, control_hits: np.ndarray, control_rows: np.ndarray
) -> np.ndarray:
    """Return, for each head, the baseline that is larger on the selection half: the current one, such as the best fixed
    offset, or the hit rate on the words of a control. (buckets, heads)"""
    halves = [(buckets_in_half(counts, half), buckets_in_half(control_rows, half)) for half in (SELECTION, REPORTING)]
    # (heads,) each
    rates = [
        np.nan_to_num(_ratio(control_hits[control_half], control_rows[control_half])) for _, control_half in halves
    ]
    selection_half = halves[SELECTION][0]
    use_control = rates[SELECTION] > np.nan_to_num(_ratio(baselines[selection_half], counts[selection_half]))
    scaled = sum(own_half[:, None] * counts * rate for (own_half, _), rate in zip(halves, rates, strict=True))
    return np.where(use_control, scaled, baselines)


def _best_offset_hits(relation_metric: RelationMetric, relation_index: int) -> np.ndarray:
    """Return the arcs hit by the best fixed offset in each bucket. The offset is selected on the selection half."""
    hits = relation_metric.offsets[:, relation_index]  # (buckets, offsets)
    allowed = np.array([offset != 0 and (offset < 0 or not relation_metric.causal) for offset in BASELINE_OFFSETS])
    selection_half = buckets_in_half(relation_metric.arcs[:, relation_index], SELECTION)
    return hits[:, np.argmax(hits[selection_half].sum(0) * allowed)]


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums.sum(0) / counts.sum(0)
