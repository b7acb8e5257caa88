"""Merge two profiles of one model, as if one pass had run over both corpora, or had measured both groups of layers.

A text is assigned to a bucket by its hash, so buckets add up, and the selection and reporting halves equal those of a single
pass. Inputs that are the same in both profiles, such as the repeated tokens, count once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.directed_relations import CONTROL_SHAPES, WORD_SETS, DirectedRelation, both_directions
from headwise.analysis.metrics.induction import INDUCTION
from headwise.analysis.metrics.metric import ADD, IDENTICAL, LARGER, MetricSpec
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.role_example_positions import HEAD_ARRAYS, ExampleStore
from headwise.analysis.metrics.top_contexts import CONTEXTS_PER_HEAD, AttentionContext
from headwise.analysis.recording.text_hash_split import BUCKETS
from headwise.analysis.roles.profile_result import OWN_RELATIONS, Profile, ProfileSums, build_profile
from headwise.analysis.roles.roles import DEFAULT_ROLES, RoleEvidence, assess, score, sort_evidence
from headwise.errors import ArgumentError
from headwise.spec import Address, LayerAddress

DIFFERENT_METRICS_MESSAGE = (
    "other: profiles with different metrics or roles cannot be merged. "
    "Create both profiles with the same metrics= and roles=."
)


def merge_profiles(first: Profile, second: Profile) -> Profile:
    """Merge the sums of two profiles and assess the roles on the merged sums. Causal test results are preserved."""
    if first.extra_roles != second.extra_roles:
        raise ArgumentError(DIFFERENT_METRICS_MESSAGE)
    sums = merge_sums(first, second)
    scores = score(sums.accumulator, sums.relation_metric, (*DEFAULT_ROLES, *first.extra_roles))
    assessed, family_size = assess(scores, len(sums.addresses), sums.metadata)
    previous: dict[Address, tuple[RoleEvidence, ...]] = {}
    for part in (first, second):
        for address, entries in zip(part.addresses, part.evidence, strict=True):
            previous[address] = (*previous.get(address, ()), *entries)
    evidence = [
        carry_over_effects(entries, previous[address])
        for address, entries in zip(sums.addresses, assessed, strict=True)
    ]
    return build_profile(sums, evidence, family_size, first.extra_roles)


def merge_sums(first: ProfileSums, second: ProfileSums) -> ProfileSums:
    """Merge the sums of two passes. Documents with relations that are the same in both count once."""
    if not {*first.addresses} & {*second.addresses}:
        return join_layers(first, second)
    check_mergeable(first, second)
    relation_source, same_documents = merge_relation_sources(first.metadata, second.metadata)
    relation_parts = [
        (sums.accumulator, sums.relation_metric) for sums in (first, second) if sums.relation_metric is not None
    ]
    metric_specs = {**first.metric_specs, **second.metric_specs}
    relation_groups = [metric.names[0] for _, metric in relation_parts if metric.names]
    accumulator = merge_accumulators(first.accumulator, second.accumulator, metric_specs, relation_groups)
    relation_metric = merge_relations(accumulator, relation_parts[:1] if same_documents else relation_parts)
    num_texts = first.metadata["texts"]
    metadata = {
        **first.metadata, "texts": num_texts + second.metadata["texts"],
        "tokens": first.metadata["tokens"] + second.metadata["tokens"],
        "documents": first.metadata["documents"] + (0 if same_documents else second.metadata["documents"]),
        "relations": relation_source,
        **{name: _join_names(first.metadata[name], second.metadata[name]) for name in ("corpus", "relations_corpus")},
    }  # fmt: skip
    top_contexts = [
        merge_top_contexts(a, b, num_texts) for a, b in zip(first.top_contexts, second.top_contexts, strict=True)
    ]
    examples = first.examples.merge(second.examples)
    return ProfileSums(first.addresses, accumulator, relation_metric, top_contexts, examples, metadata, metric_specs)


def join_layers(first: ProfileSums, second: ProfileSums) -> ProfileSums:
    """Join profiles of different layers over one corpus, as if one pass had measured all of them."""
    for key in first.metadata.keys() | second.metadata.keys():
        if key != "layers" and first.metadata.get(key) != second.metadata.get(key):
            raise ArgumentError(
                f"other: profiles of different layers can be merged only if the model, the corpus and all options are "
                f"equal. {key} differs: {first.metadata.get(key)!r} and {second.metadata.get(key)!r}."
            )
    if first.accumulator.fields != second.accumulator.fields or first.metric_specs != second.metric_specs:
        raise ArgumentError(DIFFERENT_METRICS_MESSAGE)
    addresses = (*first.addresses, *second.addresses)
    order = sorted(range(len(addresses)), key=lambda i: addresses[i])

    def join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.concatenate((a, b), 1)[:, order]  # heads are the second axis

    accumulator = Accumulator(len(addresses), dict(first.accumulator.fields))
    for kind in ("sums", "counts"):
        arrays, others = getattr(first.accumulator, kind), getattr(second.accumulator, kind)
        getattr(accumulator, kind).update({group: join(arrays[group], others[group]) for group in arrays})
    relation_metric = None
    if first.relation_metric is not None:
        relation_metric = RelationMetric(accumulator, first.relation_metric.relations, first.relation_metric.causal)
        for name, array in first.relation_metric.arc_count_arrays().items():
            relation_metric.arc_count_arrays()[name][...] = array  # arcs do not depend on heads
    a, b = first.examples, second.examples
    examples = ExampleStore(len(addresses), a.arcs, a.rows, a.feature_names, a.key_target_names)
    examples.arrays = {
        name: join(array, b.arrays[name]) if name in HEAD_ARRAYS else array for name, array in a.arrays.items()
    }
    layers = sorted(map(LayerAddress.parse, (*first.metadata["layers"], *second.metadata["layers"])))
    contexts = (*first.top_contexts, *second.top_contexts)
    return ProfileSums(
        tuple(addresses[i] for i in order), accumulator, relation_metric, [contexts[i] for i in order], examples,
        first.metadata | {"layers": [str(layer) for layer in layers]}, first.metric_specs,
    )  # fmt: skip


def check_mergeable(first: ProfileSums, second: ProfileSums) -> None:
    """Raise unless both profiles have the same heads, model and options. Equal models have equal repeated-token scores."""
    if first.addresses != second.addresses:
        raise ArgumentError(
            f"other: profiles with different heads cannot be merged. Got {len(first.addresses)} and "
            f"{len(second.addresses)} heads. Use profile.diff(other) to compare them."
        )
    for key in ("control", "seed", "row_stride"):
        if first.metadata[key] != second.metadata[key]:
            raise ArgumentError(
                f"other: profiles with different {key} cannot be merged. Got {first.metadata[key]!r} and "
                f"{second.metadata[key]!r}. Create both profiles with the same {key}."
            )
    names = [
        {name for name, spec in sums.metric_specs.items() if spec.series != "relation"} for sums in (first, second)
    ]
    if names[0] != names[1]:
        raise ArgumentError(DIFFERENT_METRICS_MESSAGE)
    induction = INDUCTION[0].name if INDUCTION[0].name in first.metric_specs else None  # not measured on images
    repeats = [sums.accumulator.bucket_sums_and_counts(induction)[0] for sums in (first, second)] if induction else []
    same_repeats = not induction or np.allclose(*repeats, rtol=1e-4, atol=1e-5)
    if first.metadata["model"] != second.metadata["model"] or not same_repeats:
        raise ArgumentError(
            "other: profiles of two different models cannot be merged. "
            "Pass a profile of the same model. To compare two training steps of one model, use profile.diff(other)."
        )


def merge_accumulators(
    first: Accumulator, second: Accumulator, metric_specs: Mapping[str, MetricSpec], excluded: Sequence[str]
) -> Accumulator:
    """Merge two accumulators, each group by its merge mode, without the `excluded` groups."""
    groups = {*first.sums, *second.sums} - {*excluded}
    groups_by_mode = {
        mode: {group for group in groups if metric_specs[group].merge == mode} for mode in (ADD, IDENTICAL, LARGER)
    }
    merged = (
        _select_groups(first, groups_by_mode[ADD])
        .merge(_select_groups(second, groups_by_mode[ADD]))
        .merge(_select_groups(first, groups_by_mode[IDENTICAL]))
    )
    for group in sorted(groups_by_mode[LARGER]):
        samples = [_select_groups(accumulator, {group}) for accumulator in (first, second)]
        merged = merged.merge(max(samples, key=_count_nonempty_buckets))  # the first of two equal ones
    return merged


def merge_relations(
    accumulator: Accumulator, parts: Sequence[tuple[Accumulator, RelationMetric]]
) -> RelationMetric | None:
    """Merge the arcs of all parts and add their metrics to `accumulator`."""
    if not parts:
        return None
    relations = _canonical_order({relation for _, relation_metric in parts for relation in relation_metric.relations})
    merged = RelationMetric(accumulator, relations, parts[0][1].causal)
    shape = (BUCKETS, accumulator.heads, len(merged.names))
    sums, counts = np.zeros(shape), np.zeros(shape)  # (buckets, heads, fields)
    for part_accumulator, part_metric in parts:
        indices = [relations.index(relation) for relation in part_metric.relations]
        merged.offsets[:, indices] += part_metric.offsets
        merged.arcs[:, indices] += part_metric.arcs
        merged.left_out[:, indices] += part_metric.left_out
        for name in part_metric.names:
            part_sums, part_counts = part_accumulator.bucket_sums_and_counts(name)  # (buckets, heads)
            sums[..., merged.names.index(name)] += part_sums
            counts[..., merged.names.index(name)] += part_counts
    if merged.names:
        accumulator.sums[merged.names[0]], accumulator.counts[merged.names[0]] = sums, counts
        accumulator.fields |= {name: (merged.names[0], column) for column, name in enumerate(merged.names)}
    return merged


def merge_relation_sources(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the source of the merged relations, and whether both profiles have the same documents, which count once. A
    profile without documents adds nothing: only one shard of a corpus needs to measure relations."""
    sources = [metadata["relations"] for metadata in (first, second) if metadata["documents"]] or [first["relations"]]
    return "+".join(dict.fromkeys(sources)), len(sources) == 2 and sources[0] == sources[1] != OWN_RELATIONS


def merge_top_contexts(
    first: Sequence[AttentionContext], second: Sequence[AttentionContext], num_texts: int
) -> list[AttentionContext]:
    """Return the contexts with the largest weights of both."""
    contexts = [*first, *(replace(context, sample=context.sample + num_texts) for context in second)]
    return sorted(contexts, key=lambda context: -context.weight)[:CONTEXTS_PER_HEAD]


def carry_over_effects(evidence: Sequence[RoleEvidence], previous: Sequence[RoleEvidence]) -> list[RoleEvidence]:
    """Copy earlier causal test results to the roles of one head: to its best role and to its roles on prompts."""
    best = next((entry for entry in evidence if not entry.family_size), None)
    return sort_evidence(
        _carry_over_effect(entry, previous) if entry is best or entry.family_size else entry for entry in evidence
    )


def _carry_over_effect(evidence: RoleEvidence, previous: Sequence[RoleEvidence]) -> RoleEvidence:
    """Copy the causal test result of the same role of the same head. It depends only on the model, so it stays valid."""
    for candidate in previous:
        same = (candidate.role, candidate.detail) == (evidence.role, evidence.detail)
        if same and candidate.cost is not None and evidence.evidence_level == "value-weighted":
            fields = ("effect", "effect_interval", "cost", "cost_threshold", "control_cost", "excess_interval")
            fields += ("mean_ablation_cost", "causal_p", "effects", "causal_on")
            evidence_level = "causal" if candidate.evidence_level == "causal" else evidence.evidence_level
            return replace(
                evidence, evidence_level=evidence_level, **{name: getattr(candidate, name) for name in fields}
            )
    return evidence


def _select_groups(accumulator: Accumulator, groups: set[str]) -> Accumulator:
    """Return an accumulator with the selected groups."""
    fields = {name: (group, column) for name, (group, column) in accumulator.fields.items() if group in groups}
    sums, counts = (
        {group: array for group, array in arrays.items() if group in groups}
        for arrays in (accumulator.sums, accumulator.counts)
    )
    return Accumulator(accumulator.heads, fields, sums, counts)


def _count_nonempty_buckets(accumulator: Accumulator) -> int:
    """Count the non-empty buckets."""
    return max((int((counts > 0).any((1, 2)).sum()) for counts in accumulator.counts.values()), default=0)


def _canonical_order(relations: set[DirectedRelation]) -> tuple[DirectedRelation, ...]:
    """Return the relations in the order of a single pass."""
    names = {relation.relation for relation in relations}
    derived, sets = sorted(names & {*CONTROL_SHAPES}), [name for name in WORD_SETS if name in names]
    return both_directions([*sorted(names - {*WORD_SETS, *CONTROL_SHAPES}), *derived, *sets])


def _join_names(first: str, second: str) -> str:
    """Join the names of two corpora."""
    return " and ".join(dict.fromkeys(name for joined in (first, second) for name in joined.split(" and ") if name))
