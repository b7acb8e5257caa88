"""Two profiles of one model as one: what was counted over two corpora, as if one pass had read them one after the other.

A text falls into a bucket by a hash of it, so buckets add up, and the halves for choosing and for reporting are those of the
one pass. What both read alike, such as the repeated tokens, counts once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.induction import INDUCTION
from headwise.analysis.metrics.metric import ADD, ALIKE, LARGER, Number
from headwise.analysis.metrics.relation_metrics import SETS, SHAPES, Question, questions_of
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.top_contexts import KEPT, Context
from headwise.analysis.recording.text_buckets import BUCKETS
from headwise.analysis.roles.roles import Support, in_order
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.analysis.roles.profile_result import Profile

OWN = "own"  # relations are those of the texts themselves, not of documents apart


def check_alike(one: "Profile", other: "Profile") -> None:
    """Whether two profiles are of one model, made in one way: on the same repeated tokens it gives the same numbers."""
    if one.addresses != other.addresses:
        raise HeadwiseError(
            f"profiles of {len(one)} and of {len(other)} heads that are not the same cannot be merged; see diff."
        )
    for what in ("control", "seed", "detail", "every"):
        if one.about[what] != other.about[what]:
            raise HeadwiseError(
                f"profiles with {what}={one.about[what]!r} and {other.about[what]!r} cannot be merged; make both alike."
            )
    asked = [
        ({name for name, number in made.numbers.items() if number.series != "relation"}, made.own)
        for made in (one, other)
    ]
    if asked[0] != asked[1]:
        raise HeadwiseError("profiles with different measures or roles cannot be merged; measure both alike.")
    said = INDUCTION[0].name if INDUCTION[0].name in one.numbers else None  # pictures are not said twice
    repeats = [made.tally.per_bucket(said)[0] for made in (one, other)] if said else []
    if one.about["model"] != other.about["model"] or (said and not np.allclose(*repeats, rtol=1e-4, atol=1e-5)):
        raise HeadwiseError("these are profiles of two models, which cannot be merged; compare them by diff.")


def merge_tallies(one: Tally, other: Tally, numbers: Mapping[str, Number], apart: Sequence[str]) -> Tally:
    """Both, each group as its numbers merge, but for the groups `apart`."""
    groups = {*one.sums, *other.sums} - {*apart}
    ways = {way: {group for group in groups if numbers[group].merge == way} for way in (ADD, ALIKE, LARGER)}
    merged = _only(one, ways[ADD]).merge(_only(other, ways[ADD])).merge(_only(one, ways[ALIKE]))
    for group in sorted(ways[LARGER]):
        samples = [_only(made, {group}) for made in (one, other)]
        merged = merged.merge(max(samples, key=_filled))  # of two that are alike, the first
    return merged


def merge_relations(tally: Tally, parts: Sequence[tuple[Tally, Relations]]) -> Relations | None:
    """The arcs of all parts, each with its tally; `tally` takes up their measures."""
    if not parts:
        return None
    questions = _ordered({question for _, relations in parts for question in relations.questions})
    merged = Relations(tally, questions, parts[0][1].causal)
    shape = (BUCKETS, tally.heads, len(merged.names))
    sums, counts = np.zeros(shape), np.zeros(shape)  # (buckets, heads, fields)
    for counted, part in parts:
        at = [questions.index(question) for question in part.questions]
        merged.offsets[:, at] += part.offsets
        merged.arcs[:, at] += part.arcs
        merged.left_out[:, at] += part.left_out
        for name in part.names:
            made, rows = counted.per_bucket(name)  # (buckets, heads)
            sums[..., merged.names.index(name)] += made
            counts[..., merged.names.index(name)] += rows
    if merged.names:
        tally.sums[merged.names[0]], tally.counts[merged.names[0]] = sums, counts
        tally.fields |= {name: (merged.names[0], place) for place, name in enumerate(merged.names)}
    return merged


def merge_sources(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, bool]:
    """What relations both are of, and whether they are the same documents, which count once. A profile that asked none adds
    none: only one shard of a corpus needs to ask."""
    asked = [about["relations"] for about in (one, other) if about["documents"]] or [one["relations"]]
    return "+".join(dict.fromkeys(asked)), len(asked) == 2 and asked[0] == asked[1] != OWN


def merge_evidence(one: Sequence[Context], other: Sequence[Context], texts: int) -> list[Context]:
    """The strongest of both."""
    both = [*one, *(replace(context, unit=context.unit + texts) for context in other)]
    return sorted(both, key=lambda context: -context.weight)[:KEPT]


def keep_effects(found: Sequence[Support], earlier: Sequence[Support]) -> list[Support]:
    """The roles of one head with what ablation showed for them before: for the first, and for those on prompts."""
    best = next((one for one in found if not one.family), None)
    return in_order(_keep_effect(one, earlier) if one is best or one.family else one for one in found)


def _keep_effect(support: Support, earlier: Sequence[Support]) -> Support:
    """What ablation showed for the same role of the same head: it is about the model, and is not asked again."""
    for before in earlier:
        same = (before.role, before.detail) == (support.role, support.detail)
        if same and before.cost is not None and support.rung == "effective":
            told = ("effect", "effect_interval", "cost", "bar", "control", "beyond_interval", "mean_cost", "causal_p")
            told += ("effects", "causal_on")
            rung = "causal" if before.rung == "causal" else support.rung
            return replace(support, rung=rung, **{name: getattr(before, name) for name in told})
    return support


def _only(tally: Tally, groups: set[str]) -> Tally:
    """Some groups of a tally."""
    fields = {name: (group, place) for name, (group, place) in tally.fields.items() if group in groups}
    sums, counts = (
        {group: array for group, array in arrays.items() if group in groups} for arrays in (tally.sums, tally.counts)
    )
    return Tally(tally.heads, fields, sums, counts)


def _filled(tally: Tally) -> int:
    """How many buckets have something in them."""
    return max((int((counts > 0).any((1, 2)).sum()) for counts in tally.counts.values()), default=0)


def _ordered(questions: set[Question]) -> tuple[Question, ...]:
    """In the order in which one pass would ask them."""
    names = {question.relation for question in questions}
    derived, sets = sorted(names & {*SHAPES}), [name for name in SETS if name in names]
    return questions_of([*sorted(names - {*SETS, *SHAPES}), *derived, *sets])
