"""The best head for each relation, compared with the best fixed offset (after https://arxiv.org/abs/1906.04341).

Also the best head for coreference. Head, direction and offset are selected on one half of the texts and evaluated on the
other half.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch

from headwise.analysis.metrics.directed_relations import (
    CONTROL_RELATIONS,
    HITS,
    MATCHED,
    OTHERS,
    WORD_SETS,
    DirectedRelation,
)
from headwise.analysis.metrics.gold_arc_data import BASELINE_OFFSETS
from headwise.analysis.metrics.statistics import bootstrap_difference_interval, bootstrap_interval, max_t_test
from headwise.analysis.recording.batching import reachable_hook_points
from headwise.analysis.recording.text_hash_split import BUCKETS, REPORTING, SELECTION, buckets_in_half
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import ArgumentError
from headwise.heads.hook_point import AttentionCall
from headwise.model import ModelProtocol, eval_mode
from headwise.text.annotated_documents import GAPExample


class BestHead(NamedTuple):
    """The best head and direction for one relation, evaluated on the reporting half of the texts.

    Attributes:
        relation: Name of the relation.
        direction: ">" from the first word of a gold arc to the second, "<" from the second to the first.
        arcs: Number of arcs on the reporting half.
        head: Address of the best head.
        accuracy: Fraction of arcs whose target receives the largest attention weight.
        low: Lower bound of the 95% confidence interval of `accuracy`.
        high: Upper bound of the 95% confidence interval of `accuracy`.
        offset: The best fixed offset.
        offset_accuracy: Accuracy of the best fixed offset (baseline).
        excess: Attention weight above other pairs of the same text at the same distance.
        coverage: Fraction of arcs that have such pairs.
        p: p-value of the head against the offset, family-wise over relations.
    """

    relation: str
    direction: str
    arcs: int
    head: str
    accuracy: float
    low: float
    high: float
    offset: int
    offset_accuracy: float
    excess: float
    coverage: float
    p: float


def best_relation_heads(profile: Profile, min_arcs: int = 40) -> list[BestHead]:
    """Find the best head for every relation with enough arcs.

    Args:
        profile: A profile on documents with relations.
        min_arcs: Minimum number of arcs on the reporting half.

    Returns:
        One row per relation, most frequent relation first.
    """
    relation_metric = profile.relation_metric
    if relation_metric is None:
        raise ArgumentError(
            "profile: contains no relations. Create it from documents with annotated relations between words, for example "
            "hw.profile(model, relations=...)."
        )
    rows, tests = [], []
    for name in dict.fromkeys(relation.relation for relation in relation_metric.relations):
        candidates = [
            _best_head(profile, DirectedRelation(name, direction))
            for direction in "><"
            if name not in WORD_SETS and name not in CONTROL_RELATIONS
        ]
        candidates = [item for item in candidates if item is not None and item[0].arcs >= min_arcs]
        if candidates:
            row, _, test = max(candidates, key=lambda item: item[1])
            rows.append(row)
            tests.append(test)
    if not rows:
        return []
    hits, baselines, counts = (np.stack([test[i] for test in tests], -1) for i in range(3))
    p, _ = max_t_test(hits, baselines, counts)
    return sorted((row._replace(p=float(item)) for row, item in zip(rows, p, strict=True)), key=lambda row: -row.arcs)


def _best_head(profile: Profile, relation: DirectedRelation) -> tuple[BestHead, float, list[np.ndarray]] | None:
    relation_metric = profile.relation_metric
    assert relation_metric is not None
    index = relation_metric.relations.index(relation)
    hits, counts = profile.accumulator.bucket_sums_and_counts(relation.metric_specs[HITS].name)
    choosing, reporting = (buckets_in_half(counts, half) for half in (SELECTION, REPORTING))
    if not reporting.any():
        return None
    accuracy = hits[choosing].sum(0) / np.maximum(counts[choosing].sum(0), 1)  # cross-attention has no counts
    head = int(accuracy.argmax())
    fixed = relation_metric.offsets[:, index]  # (buckets, offsets)
    offset = int(fixed[choosing].sum(0).argmax())
    head_hits, arcs = hits[reporting, head], counts[reporting, head]
    low, high = bootstrap_interval(head_hits[:, None], arcs[:, None])
    matched, others = (
        profile.accumulator.bucket_sums_and_counts(relation.metric_specs[kind].name) for kind in (MATCHED, OTHERS)
    )
    matched_count = matched[1][reporting, head].sum()
    excess = (matched[0] - others[0])[reporting, head].sum() / matched_count if matched_count else np.nan
    row = BestHead(
        relation.relation, relation.direction, int(arcs.sum()), str(profile.addresses[head]),
        float(head_hits.sum() / arcs.sum()), float(low[0]), float(high[0]), BASELINE_OFFSETS[offset],
        float(fixed[reporting, offset].sum() / arcs.sum()),
        float(excess), float(matched_count / arcs.sum()), float("nan"),
    )  # fmt: skip
    test_arrays = (hits[:, head], fixed[:, offset], counts[:, head])  # each relation has its own split
    # (buckets,): the other half is empty
    return row, float(accuracy[head]), [values * reporting for values in test_arrays]


class CoreferenceResult(NamedTuple):
    """The best head for coreference: a pronoun should attend more to the correct one of two names.

    Attributes:
        head: Address of the best head, selected on one half of the cases.
        num_cases: Number of cases on the reporting half.
        accuracy: Fraction of cases in which the correct name receives more attention.
        low: Lower bound of the 95% confidence interval of `accuracy`.
        high: Upper bound of the 95% confidence interval of `accuracy`.
        nearer_accuracy: Accuracy of always choosing the nearer name (baseline).
        difference_interval: 95% confidence interval of the paired difference between head and baseline.
    """

    head: str
    num_cases: int
    accuracy: float
    low: float
    high: float
    nearer_accuracy: float
    difference_interval: tuple[float, float]


@torch.no_grad()
def best_coreference_head(model: ModelProtocol, cases: Iterable[GAPExample]) -> CoreferenceResult:
    """Find the best coreference head on the GAP cases in which one name is correct (https://arxiv.org/abs/1810.05201)."""
    eligible = [case for case in cases if case.answer is not None]
    if model.spec.kind == "decoder":  # a decoder cannot attend to later names
        eligible = [case for case in eligible if max(*case.a, *case.b) < case.pronoun]
    samples = list(TokenizedCorpus.of(model, [case.document for case in eligible]))
    addresses = [address for hook_point in reachable_hook_points(model) for address in hook_point.head_addresses]
    correct = np.zeros((BUCKETS, len(addresses)))
    counts, nearer = np.zeros(BUCKETS), np.zeros(BUCKETS)
    for sample, case in zip(samples, eligible, strict=True):
        tokens = sample.alignment.tokens_of_word
        rows = list(tokens[case.pronoun])
        names = [sorted({token for word in span for token in tokens[word]}) for span in (case.a, case.b)]
        weights: list[torch.Tensor] = []

        def on_call(
            call: AttentionCall, rows: list[int] = rows, names: list[list[int]] = names, weights: list = weights
        ) -> None:
            p = call.map_rows(rows)[0].mean(1)  # (H, S)
            weights.append(torch.stack([p[:, span].sum(-1) for span in names], -1))  # (H, 2)

        with eval_mode(model), ExitStack() as stack:
            for hook_point in reachable_hook_points(model):
                stack.enter_context(hook_point.listen(on_call))
            model(torch.tensor([sample.ids], device=model.device), hidden=True)
        choice = torch.cat(weights).cpu().numpy()  # (heads, 2)
        bucket = sample.bucket
        margin = choice[:, 0] - choice[:, 1] if case.answer == "A" else choice[:, 1] - choice[:, 0]
        correct[bucket] += np.where(margin == 0, 0.5, margin > 0)  # a tie counts as half correct
        counts[bucket] += 1
        nearer[bucket] += case.nearest_name_answer == case.answer
    head = int(correct[buckets_in_half(counts, SELECTION)].sum(0).argmax())
    reporting = buckets_in_half(counts, REPORTING)
    head_correct, n, nearer = correct[reporting, head], counts[reporting], nearer[reporting]
    low, high = bootstrap_interval(head_correct[:, None], n[:, None])
    gap = bootstrap_difference_interval(head_correct, n, nearer, n)
    return CoreferenceResult(
        str(addresses[head]), int(n.sum()), float(head_correct.sum() / n.sum()), float(low[0]), float(high[0]),
        float(nearer.sum() / n.sum()), (float(gap[0]), float(gap[1])),
    )  # fmt: skip
