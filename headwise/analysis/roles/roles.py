"""Roles and the evidence levels of a head's role.

    none            the score exceeds its baseline by the role's threshold on the half of the texts used for selection only
    attention       it does so on the other half as well (max-T test, corrected for all heads, roles and directions)
    value-weighted  it does so too if attention is weighted by the norm of the value vectors
    causal          ablating the head costs the role's answers more than the same answers reached another way, and more than
                    ablating other heads of its layer, on every token set that is tested (see causal.py)

A head whose roles have level `none` is reported as `unclear`. Idle patterns are reported separately from roles.
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
from headwise.analysis.metrics.gold_word_arcs import BASELINE_OFFSETS
from headwise.analysis.metrics.induction import DUPLICATE, INDUCTION
from headwise.analysis.metrics.metric import MetricSpec
from headwise.analysis.metrics.offsets import ELIGIBLE_SPECS, LOCAL_SPECS, LONG_RANGE_SPECS
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.row_shape import ENTROPY, FIRST_TOKEN, OUTPUT_SHARE, RELATIVE_ENTROPY
from headwise.analysis.metrics.statistics import MIN_UNITS, bootstrap_interval, max_t_test
from headwise.analysis.metrics.token_classes import CLASS_SPECS, CLASSES
from headwise.analysis.recording.text_hash_split import REPORTING, SELECTION, buckets_in_half
from headwise.analysis.roles.causal_effects import CausalEffect
from headwise.errors import HeadwiseError, suggest_names
from headwise.text.annotated_document import Document

# Probes: tokens said twice; the same where a head holds them back; prompts of the role's own, by answer or by lead.
REPEATS_PROBE, SUPPRESSION_PROBE, PROMPT_PROBE, LEAD = "repeats", "held back", "due", "lead"
EVIDENCE_LEVELS = ("none", "attention", "value-weighted", "causal")


@dataclass(frozen=True)
class Role:
    """One row: the metric that is the score, and how far above its baseline it must be: (score − baseline) /
    (1 − baseline)."""

    name: str
    metric_spec: MetricSpec  # it has a baseline and a value-weighted twin, over the same rows: those with a target
    threshold: float
    probe: str | None = (
        None  # what is asked of the model when the head is taken away: one of those above, or of a relation
    )
    detail: str = ""  # told beside the role: an offset, a direction
    is_relation: bool = False  # asked of gold arcs
    is_hit_rate: bool = False  # its score is how often a word looks hardest at the right one
    separate_family: bool = False  # asked on prompts of its own, and tested in a family of its own


def offset_role(offset: int) -> Role:
    """A head that looks a fixed number of tokens back, or ahead."""
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
MAX_BASELINE = 0.8  # a role whose baseline is above this is not told: a little more would look like all there is
RELATION_THRESHOLD = 0.1  # the threshold of every relation, in accuracy above the best fixed offset
MIN_CONTROL_BUCKETS = 5  # buckets of texts, in each half, that a control needs to say anything
MIN_EXCESS = 0.02  # and the weight its arcs must have above other pairs at the same distance
# relation: where a model that follows it must show it
RELATION_PROBES = {
    "bracket": "later word", "quote": "later word", "copy": "later word", "if-then": "later word",
    "subject-verb": "later word", "nsubj": "later word", "pronoun-antecedent": "referent",
}  # fmt: skip
ROLE_OF_RELATION = {
    "related": "semantic",
    "pronoun-antecedent": "coreference",
    "coref": "coreference",
    "same class": "part of speech",
    "delimiter": "sentence end",  # a full stop looks at the one before; the class of tokens has the other name
}
SINGLE_OFFSET_ROLES = ("previous token", "next token", "self", "fixed offset")
IDLE_PATTERNS = ("sink", "special token", "broad", "idle")


@dataclass(frozen=True, eq=False)
class RoleScores:
    """One role in one form, for all heads at once: sums per bucket and head, and what they are sums over."""

    role: Role
    scores: np.ndarray  # (buckets, heads)
    baselines: np.ndarray
    value_weighted: np.ndarray
    counts: np.ndarray
    coverage: np.ndarray | None = None  # (heads,): the share of rows that could be compared, on the half for reporting

    def gain(self, half: int, value_weighted: bool = False) -> np.ndarray:
        """(score − baseline) / (1 − baseline) on one half: (heads,); NaN where nothing was asked."""
        score, baseline = self.mean(half, value_weighted), self.baseline(half)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (score - baseline) / (1 - baseline)

    def mean(self, half: int, value_weighted: bool = False) -> np.ndarray:
        """The score on one half: (heads,)."""
        buckets = self.buckets_in_half(half)
        return _ratio((self.value_weighted if value_weighted else self.scores)[buckets], self.counts[buckets])

    def baseline(self, half: int) -> np.ndarray:
        """The baseline on one half: (heads,)."""
        buckets = self.buckets_in_half(half)
        return _ratio(self.baselines[buckets], self.counts[buckets])

    def buckets_in_half(self, half: int) -> np.ndarray:
        """Which buckets are in a half, (buckets,)."""
        return buckets_in_half(self.counts, half)


@dataclass(frozen=True)
class RoleEvidence:
    """What speaks for one head having one role."""

    role: str
    detail: str
    evidence_level: str
    score: float  # on the half for reporting
    baseline: float
    interval: tuple[float, float]
    gain: float
    p: float  # family-wise
    coverage: float  # the share of rows that could have the target or, of a relation, that could be compared
    probe: str | None
    rows: int
    effect: float | None = None  # what taking the head away costs its probe, beyond others of its layer, nats an answer
    effect_interval: tuple[float, float] | None = None
    cost: float | None = None  # what it costs by itself
    cost_threshold: float | None = None  # and what that must be above for the head to be causal
    control_cost: float | None = (
        None  # what it costs where the same answers are reached another way; None: nowhere found
    )
    excess_interval: tuple[float, float] | None = None  # of cost − control_cost
    mean_ablation_cost: float | None = (
        None  # what it costs with its mean in its place, asked of heads that stand so far
    )
    causal_p: float | None = None  # the largest of its token sets, family-wise; None: not tried, for lack of a control
    is_relation: bool = False  # whether it was asked of gold arcs
    corpus_label: str = ""  # the texts on which it was shown, in words
    family_size: int = 0  # tests that p is corrected for, where they are not those of the profile
    hits: bool = False  # the score is a share of cases in which the right target gets the largest weight
    effects: tuple[CausalEffect, ...] = ()  # of each token set tried; the numbers above are those of the first
    causal_on: tuple[str, ...] = ()  # the token sets, or prompts, on which the causal test holds

    def with_effects(self, effects: Sequence[CausalEffect], num_token_sets: int) -> "RoleEvidence":
        """Return the evidence with the results of its causal test.

        The level is causal only if the test passes on all token sets; otherwise `causal_on` names those that pass.
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

    @property
    def evidence_label(self) -> str:
        """Evidence level in words, with the token sets on which the causal test holds."""
        sets = " and ".join(self.causal_on)
        if not sets:
            return self.evidence_level
        return f"causal on {sets}" if self.evidence_level == "causal" else f"{self.evidence_level}; causal on {sets}"

    @property
    def is_supported(self) -> bool:
        """Whether it is told: a mere pattern is not."""
        return self.evidence_level != EVIDENCE_LEVELS[0]

    @property
    def sort_key(self) -> tuple[int, float]:
        """Roles rank by evidence level, then by gain."""
        return EVIDENCE_LEVELS.index(self.evidence_level), self.gain


EvidencePerHead = Sequence[Sequence[RoleEvidence]]  # for each head, best first


def role_names(documents: Iterable[Document]) -> set[str]:
    """Every role a head may be found to have: those of the table, and those of the relations in some documents.

    >>> from headwise.text.annotated_document import Relation
    >>> sorted(role_names([Document.of(["it", "runs"], [Relation("subject-verb", 1, 0)])]) - role_names([]))
    ['subject-verb']
    """
    names = {arc.name for document in documents for arc in document.relations} | {*WORD_SETS}
    return {role.name for role in DEFAULT_ROLES} | {
        ROLE_OF_RELATION.get(name, name) for name in names - CONTROL_RELATIONS
    }


def check_roles(roles: Sequence[Role], metric_specs: Iterable[MetricSpec]) -> None:
    """Whether some roles can be judged beside the usual ones, on what is measured."""
    measured = {spec.name for spec in metric_specs}
    used_names = {(role.name, role.detail) for role in DEFAULT_ROLES}
    for role in roles:
        metric_spec = role.metric_spec
        if not metric_spec.baseline or not metric_spec.value_weighted:
            raise HeadwiseError(
                f"the role {role.name!r} needs a metric with a baseline and a value-weighted twin; "
                f"{metric_spec.name!r} has none."
            )
        if not {metric_spec.name, metric_spec.baseline, metric_spec.value_weighted} <= measured:
            raise HeadwiseError(
                f"the role {role.name!r} needs {metric_spec.name!r} to be measured; give it in metrics=[…]."
            )
        if (role.name, role.detail) in used_names:
            raise HeadwiseError(f"there is a role {role.name!r} already; give yours another name or detail.")
        if not 0 < role.threshold < 1 or role.probe not in (
            None,
            REPEATS_PROBE,
            SUPPRESSION_PROBE,
            *[PROMPT_PROBE, LEAD] * role.separate_family,
        ):
            raise HeadwiseError(
                f"the role {role.name!r} needs a threshold between 0 and 1 and the probe {REPEATS_PROBE!r}, "
                f"{SUPPRESSION_PROBE!r} or none; got {role.threshold} and {role.probe!r}."
            )
        used_names.add((role.name, role.detail))


def score(
    accumulator: Accumulator,
    relation_metric: RelationMetric | None,
    roles: Sequence[Role] = DEFAULT_ROLES,
    only_role: str | None = None,
) -> list[RoleScores]:
    """Return score, baseline and value-weighted score of every role that was measured, or of one, for all heads."""
    all_scores = list(_metric_role_scores(accumulator, roles))
    if relation_metric is not None:
        all_scores += _relation_role_scores(accumulator, relation_metric)
    if only_role is not None:
        available = {scores.role.name for scores in all_scores}
        if only_role not in available:
            raise HeadwiseError(f"there is no role {only_role!r} here; {suggest_names(only_role, available)}")
        all_scores = [scores for scores in all_scores if scores.role.name == only_role]
    return all_scores


def assess(
    all_scores: Sequence[RoleScores], heads: int, metadata: Mapping[str, Any] | None = None
) -> tuple[list[list[RoleEvidence]], int]:
    """Select roles on one half of the texts and test them on the other.

    Args:
        all_scores: Scores of every role.
        heads: Number of heads.
        metadata: Metadata of the pass. It labels the evidence with the corpus and with the offset chosen for a head.

    Returns:
        The evidence for the roles of each head, best first, and the number of tests. Roles of a separate family come after
        the others of their evidence level, so that the others are reported, and ablated, as they are without them.
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
        unique = [[_label(entry, head, metadata) for entry in entries] for head, entries in enumerate(unique)]
    return unique, family_size


def _label(evidence: RoleEvidence, head: int, metadata: Mapping[str, Any]) -> RoleEvidence:
    """Add the name of the corpus to the evidence of a head, and the offset or position that was chosen for it."""
    corpus_label = evidence.corpus_label or metadata["relations_corpus" if evidence.is_relation else "corpus"]
    choices = metadata.get("chosen_offsets", {})
    detail = str(choices[evidence.role][head]) if evidence.role in choices else evidence.detail
    return replace(evidence, corpus_label=corpus_label, detail=detail)


def sort_evidence(evidence: Iterable[RoleEvidence]) -> list[RoleEvidence]:
    """The best first: by evidence level; those of the first family; by gain."""
    return sorted(evidence, key=lambda entry: (entry.sort_key[0], not entry.family_size, entry.gain), reverse=True)


def _assess_family(all_scores: Sequence[RoleScores], heads: int) -> tuple[list[list[RoleEvidence]], int]:
    """One family."""
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
    )  # (buckets, heads, cases): the other half is empty
    p, family_size = max_t_test(scores, baselines, counts)
    p_value_weighted, _ = max_t_test(value_weighted, baselines, counts)
    evidence: list[list[RoleEvidence]] = [[] for _ in range(heads)]
    for index, (role_scores, half) in enumerate(zip(all_scores, reporting, strict=True)):
        role, row_counts = role_scores.role, role_scores.counts[half]  # (buckets, heads)
        selection_gain, reporting_gain = role_scores.gain(SELECTION), role_scores.gain(REPORTING)
        weighted_gain = role_scores.gain(REPORTING, value_weighted=True)
        has_enough = (row_counts > 0).sum(0) >= MIN_UNITS
        highest_baseline = np.maximum(role_scores.baseline(SELECTION), role_scores.baseline(REPORTING))
        below_max_baseline = highest_baseline <= MAX_BASELINE  # NaN is not
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
    """Where each head rests: on the first token, on special tokens, everywhere alike, or without writing anything."""
    names = (FIRST_TOKEN.name, SPECIAL, RELATIVE_ENTROPY.name, OUTPUT_SHARE.name)
    missing = np.full(accumulator.heads, np.nan)  # pictures have no first token
    first, special, relative_entropy, output_share = (
        accumulator.mean(name) if name in accumulator.fields else missing for name in names
    )
    relative_output = output_share * heads_in_layer
    flags = np.stack((first > 0.3, (special > 0.3) & (first <= 0.3), relative_entropy > 0.9, relative_output < 0.2), -1)
    return [tuple(name for name, flag in zip(IDLE_PATTERNS, row, strict=True) if flag) for row in flags]


def _drop_duplicate_roles(evidence: list[RoleEvidence]) -> list[RoleEvidence]:
    """Each role once, in its best form; `local` only where no single offset says nearly as much."""
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
        # of texts of its own every row is asked
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
        baselines = _best_offset(relation_metric, index)[:, None] * np.ones(accumulator.heads)
        for control_hits, control_rows in _control_hits(accumulator, relation_metric, relation):
            baselines = _larger_baseline(baselines, counts, control_hits, control_rows)
        selection_half = buckets_in_half(counts, SELECTION)
        excess = _ratio(matched[selection_half], matched_counts[selection_half]) - _ratio(
            others[selection_half], matched_counts[selection_half]
        )
        follows = np.nan_to_num(excess) >= MIN_EXCESS  # a hard positional head has exactly none
        yield RoleScores(role, hits * follows, baselines, value_weighted * follows, counts, coverage)


def _control_hits(
    accumulator: Accumulator, relation_metric: RelationMetric, relation: DirectedRelation
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """How often each head looks at the wrong words, for each control of a relation: hits, rows, (buckets, heads) each."""
    ahead = relation_metric.offsets[:, relation_metric.relations.index(relation)].sum(0) @ np.sign(BASELINE_OFFSETS) > 0
    for control in CONTROLS.get(relation.relation, ()):
        back = "<" if ahead else ">"  # those made here look back by >
        control_relation = DirectedRelation(control, relation.direction if control not in CONTROL_SHAPES else back)
        if control_relation in relation_metric.relations:
            hits, rows = accumulator.bucket_sums_and_counts(control_relation.metric_specs[HITS].name)
            if min(buckets_in_half(rows, half).sum() for half in (SELECTION, REPORTING)) >= MIN_CONTROL_BUCKETS:
                yield hits, rows


def _coverage(matched: np.ndarray, total: np.ndarray) -> np.ndarray:
    """The share of rows, on the half for reporting: (heads,)."""
    half = buckets_in_half(total, REPORTING)
    return np.nan_to_num(_ratio(matched[half], total[half]))


def _larger_baseline(
    baselines: np.ndarray, counts: np.ndarray, control_hits: np.ndarray, control_rows: np.ndarray
) -> np.ndarray:
    """Of two baselines the one that is larger on the half for choosing, for each head: the one so far, such as the best fixed
    offset, or how often it looks at the words of a control. (buckets, heads)"""
    halves = [(buckets_in_half(counts, half), buckets_in_half(control_rows, half)) for half in (SELECTION, REPORTING)]
    # (heads,) each
    rates = [
        np.nan_to_num(_ratio(control_hits[control_half], control_rows[control_half])) for _, control_half in halves
    ]
    selection_half = halves[SELECTION][0]
    use_control = rates[SELECTION] > np.nan_to_num(_ratio(baselines[selection_half], counts[selection_half]))
    scaled = sum(own_half[:, None] * counts * rate for (own_half, _), rate in zip(halves, rates, strict=True))
    return np.where(use_control, scaled, baselines)


def _best_offset(relation_metric: RelationMetric, relation_index: int) -> np.ndarray:
    """How many arcs the best fixed offset hits in each bucket; the offset is chosen on the half for choosing."""
    hits = relation_metric.offsets[:, relation_index]  # (buckets, offsets)
    allowed = np.array([offset != 0 and (offset < 0 or not relation_metric.causal) for offset in BASELINE_OFFSETS])
    selection_half = buckets_in_half(relation_metric.arcs[:, relation_index], SELECTION)
    return hits[:, np.argmax(hits[selection_half].sum(0) * allowed)]


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums.sum(0) / counts.sum(0)
