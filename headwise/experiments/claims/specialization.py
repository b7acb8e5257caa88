"""Heads specialise."""

from collections.abc import Iterator
from typing import Any

from headwise.analysis.roles.best_heads import best_heads
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.roles import RELATION, RUNGS
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import At, Figures
from headwise.experiments.experiment import Lab
from headwise.model import AnyModel

FEWEST = 20  # arcs on the half for reporting that a relation needs
MOST = 0.5  # of the heads must have a role
SOME = 0.05  # of the heads, beyond the untrained model's


def having_roles(found: Profile) -> float:
    """The share of heads with a role that stands on held-out texts: `selective` or better."""
    return sum(RUNGS.index(head.rung) >= RUNGS.index("selective") for head in found) / len(found)


def followed(found: Profile, fewest: int = FEWEST) -> dict[str, tuple[float, bool]]:
    """For each relation, how much oftener its best head is right than the best fixed offset; and whether that counts.

    Head, direction and offset are chosen on one half of the texts and told on the other.
    """
    rows = best_heads(found, fewest)
    gains = {row.relation: row.accuracy - row.offset_accuracy for row in rows}
    return {row.relation: (gains[row.relation], gains[row.relation] >= RELATION and row.p < 0.05) for row in rows}


def points(lab: Lab) -> list[Point]:
    """The usual model."""
    return [lab.point(seed) for seed in lab.seeds]


def measure(lab: Lab) -> Figures:
    """The usual model after its last step, beside itself before the first."""
    pairs = []
    for seed in lab.seeds:
        made, texts = lab.made(lab.point(seed)), lab.documents(seed)
        pairs.append(tuple(profile(made.model(step), texts, causal=False) for step in (0, None)))
    return _beside(pairs)


def _asks(figures: Figures) -> Iterator[tuple[str, At]]:
    yield "share of heads with a role", "trained"
    yield "share of heads with a role, gained", None
    yield "relations followed, gained", None


def on(model: AnyModel, text: Any = None) -> Figures:
    """A model beside one of the same spec that has learned nothing."""
    return _beside([tuple(profile(model, text, causal=False, control=control) for control in ("random-init", None))])


def _beside(pairs: list[tuple[Profile, ...]]) -> Figures:
    figures = Figures()
    roles = [[having_roles(found) for found in pair] for pair in pairs]
    gains = [[followed(found) for found in pair] for pair in pairs]
    counts = [[sum(counted for _, counted in some.values()) for some in pair] for pair in gains]
    for place, name in enumerate(("untrained", "trained")):
        figures.add("share of heads with a role", name, [pair[place] for pair in roles])
        figures.add("relations followed", name, [pair[place] for pair in counts])
        for relation in dict.fromkeys(relation for pair in gains for relation in pair[place]):
            told = [pair[place][relation][0] for pair in gains if relation in pair[place]]
            figures.add(f"right beyond the best offset, {name}", relation, told)
    figures.add("share of heads with a role, gained", None, [new - old for old, new in roles])
    return figures.add("relations followed, gained", None, [new - old for old, new in counts])


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    share = figures["share of heads with a role", "trained"]
    relations = figures["relations followed, gained"]
    gained = figures["share of heads with a role, gained"]
    if not gained.above(SOME) and not relations.above(0):
        if gained.below(SOME) and relations.below(1):
            return Verdict("does not hold")
        return Verdict("depends", "on the seed: whether heads come to have roles or follow relations stays open")
    if share.above(MOST) and relations.above(0):
        return Verdict("holds")
    told = (
        f"{share.mean:.0%} have a role, and {figures['relations followed', 'trained'].mean:.1f} relations are followed"
    )
    sure = share.below(MOST) or relations.below(1)
    return Verdict("depends", f"on the {'head' if sure else 'seed'}: {told} beyond a fixed offset")


CLAIM = Claim(
    number=9,
    name="specialise",
    says="Heads specialise: each comes to do a job of its own, such as following one relation of grammar.",
    against="Heads that do after training nothing an untrained model's do not, or that look where a fixed offset would.",
    setup=f"Every head's profile on held-out text, before training and after. Heads whose role is `selective` or better are "
    f"counted: above its null on texts it was not chosen on, over all heads and roles tested. And for each relation with at "
    f"least {FEWEST} arcs the best head is held against the best fixed offset, both chosen on one half of the texts and told "
    f"on the other; followed means {RELATION:g} more accurate, with p < .05 over the relations.",
    rule=f"Does not hold if the share of heads with a role surely grew by less than {SOME:g} in training and the number of "
    f"relations followed by less than one. Depends on the seed if that is not sure, but neither is that the share grew by "
    f"more than {SOME:g} or the number by more than none. Else holds if surely more than {MOST:.0%} of heads have a role and "
    f"relations surely came to be followed. Else depends: on the head if one of these surely is not so, on the seed if that "
    f"stays open.",
    asks=_asks,
    measure=measure,
    judge=judge,
    picture=Picture(("right beyond the best offset, trained", "right beyond the best offset, untrained"), y="accuracy"),
    points=points,
    on=on,
)
