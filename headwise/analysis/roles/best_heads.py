"""The best head for each relation beside the best fixed offset (after https://arxiv.org/abs/1906.04341), and for coreference.

The head, its direction and the offset are chosen on one half of the texts and reported on the other.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import torch

from headwise.analysis.metrics.relation_metrics import HITS, MATCHED, NO_ROLE, OTHERS, SETS, Question
from headwise.analysis.metrics.statistics import bootstrap, bootstrap_difference, max_t
from headwise.analysis.metrics.word_arcs import NEAREST
from headwise.analysis.recording.batching import read_sites
from headwise.analysis.recording.text_buckets import BUCKETS, CHOOSING, REPORTING, in_half
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen
from headwise.model import AnyModel, quiet
from headwise.text.treebank import Pronoun


class Best(NamedTuple):
    """One relation: its best head and direction, their accuracy on the half for reporting, and the best offset's there."""

    relation: str
    way: str  # > from the first word of a gold arc to the second, < from the second to the first
    arcs: int  # words that have the relation, on the half for reporting
    head: str
    accuracy: float
    low: float
    high: float
    offset: int
    offset_accuracy: float
    excess: float  # weight above other pairs of the same text at the same distance
    coverage: float  # the share of words for which there are such pairs
    p: float  # head above offset, family-wise over relations


def best_heads(profile: Profile, fewest: int = 40) -> list[Best]:
    """A row for every relation with enough arcs, the most frequent first."""
    relations = profile.relations
    if relations is None:
        raise HeadwiseError("this profile has no relations; make it on documents that have some.")
    rows, tests = [], []
    for name in dict.fromkeys(question.relation for question in relations.questions):
        found = [_best_of(profile, Question(name, way)) for way in "><" if name not in SETS and name not in NO_ROLE]
        found = [one for one in found if one is not None and one[0].arcs >= fewest]
        if found:
            row, _, test = max(found, key=lambda one: one[1])
            rows.append(row)
            tests.append(test)
    if not rows:
        return []
    hits, nulls, counts = (np.stack([test[i] for test in tests], -1) for i in range(3))
    p, _ = max_t(hits, nulls, counts)
    return sorted((row._replace(p=float(one)) for row, one in zip(rows, p, strict=True)), key=lambda row: -row.arcs)


def _best_of(profile: Profile, question: Question) -> tuple[Best, float, list[np.ndarray]] | None:
    relations = profile.relations
    assert relations is not None
    number = relations.questions.index(question)
    hits, counts = profile.tally.per_bucket(question.numbers[HITS].name)
    choosing, reporting = (in_half(counts, half) for half in (CHOOSING, REPORTING))
    if not reporting.any():
        return None
    accuracy = hits[choosing].sum(0) / np.maximum(counts[choosing].sum(0), 1)  # cross-attention is not asked
    head = int(accuracy.argmax())
    fixed = relations.offsets[:, number]  # (buckets, offsets)
    offset = int(fixed[choosing].sum(0).argmax())
    told, arcs = hits[reporting, head], counts[reporting, head]
    low, high = bootstrap(told[:, None], arcs[:, None])
    matched, others = (profile.tally.per_bucket(question.numbers[kind].name) for kind in (MATCHED, OTHERS))
    fit = matched[1][reporting, head].sum()
    excess = (matched[0] - others[0])[reporting, head].sum() / fit if fit else np.nan
    row = Best(
        question.relation, question.way, int(arcs.sum()), str(profile.addresses[head]), float(told.sum() / arcs.sum()),
        float(low[0]), float(high[0]), NEAREST[offset], float(fixed[reporting, offset].sum() / arcs.sum()),
        float(excess), float(fit / arcs.sum()), float("nan"),
    )  # fmt: skip
    whole = (hits[:, head], fixed[:, offset], counts[:, head])  # relations have halves of their own
    return row, float(accuracy[head]), [values * reporting for values in whole]  # (buckets,): the other half is empty


class Coreference(NamedTuple):
    """Does a pronoun look harder at the right one of two names? The best head, chosen on one half, told on the other."""

    head: str
    cases: int
    accuracy: float
    low: float
    high: float
    nearer: float  # the baseline: the nearer name
    difference: tuple[float, float]  # the interval of head minus baseline, paired


@torch.no_grad()
def coreference(model: AnyModel, cases: Iterable[Pronoun]) -> Coreference:
    """Cases of GAP (https://arxiv.org/abs/1810.05201) where one of the names is the right one."""
    asked = [case for case in cases if case.answer is not None]
    if model.spec.kind == "decoder":  # what is not seen yet cannot be looked at
        asked = [case for case in asked if max(*case.a, *case.b) < case.pronoun]
    units = list(Reading.of(model, [case.document for case in asked]))
    addresses = [address for site in read_sites(model) for address in site.addresses]
    right = np.zeros((BUCKETS, len(addresses)))
    counts, nearer = np.zeros(BUCKETS), np.zeros(BUCKETS)
    for unit, case in zip(units, asked, strict=True):
        tokens = unit.alignment.tokens_of_word
        rows = list(tokens[case.pronoun])
        names = [sorted({token for word in place for token in tokens[word]}) for place in (case.a, case.b)]
        weights: list[torch.Tensor] = []

        def see(seen: Seen, rows: list[int] = rows, names: list[list[int]] = names, weights: list = weights) -> None:
            p = seen.rows(rows)[0].mean(1)  # (H, S)
            weights.append(torch.stack([p[:, place].sum(-1) for place in names], -1))  # (H, 2)

        with quiet(model), ExitStack() as stack:
            for site in read_sites(model):
                stack.enter_context(site.listen(see))
            model(torch.tensor([unit.ids], device=model.device), hidden=True)
        choice = torch.cat(weights).cpu().numpy()  # (heads, 2)
        bucket = unit.bucket
        ahead = choice[:, 0] - choice[:, 1] if case.answer == "A" else choice[:, 1] - choice[:, 0]
        right[bucket] += np.where(ahead == 0, 0.5, ahead > 0)  # a tie is half right, as a coin would be
        counts[bucket] += 1
        nearer[bucket] += case.nearer == case.answer
    head = int(right[in_half(counts, CHOOSING)].sum(0).argmax())
    reporting = in_half(counts, REPORTING)
    told, n, nearer = right[reporting, head], counts[reporting], nearer[reporting]
    low, high = bootstrap(told[:, None], n[:, None])
    gap = bootstrap_difference(told, n, nearer, n)
    return Coreference(
        str(addresses[head]), int(n.sum()), float(told.sum() / n.sum()), float(low[0]), float(high[0]),
        float(nearer.sum() / n.sum()), (float(gap[0]), float(gap[1])),
    )  # fmt: skip
