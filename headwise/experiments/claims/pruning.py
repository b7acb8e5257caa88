"""Many heads can be cut after training."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headwise.analysis.ablation.head_outputs import read_on
from headwise.compression.curve import Curve, curve
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.model import AnyModel

CUTS = (0.1, 0.25, 0.5, 0.75)  # shares of the heads that go, rounded up to whole heads: at least so many
MANY = 0.25
LITTLE, SOME = 0.01, 0.05  # more loss, as a share of the full model's
TEXTS = 64  # of a given text: half to choose heads on, half to judge the choice by
WAYS = {"ablation": "by what they are worth", "random": "at random"}


def more_loss(
    model: AnyModel, on: Any, test: Any, cuts: Sequence[float] = CUTS
) -> dict[str, list[tuple[float, float]]]:
    """For heads chosen by ablation and at random: the share that went, and how much more loss that gave, as a share.

    Heads are ranked on one corpus, and the loss is measured on another; what they gave on average stays.
    """
    if model.output is None:
        raise HeadwiseError("a model without an output has no loss to compare; give one that predicts tokens.")
    total = len(model.spec.addresses)
    made = curve(model, on, test, keeps=keeps(total, cuts), bys=tuple(WAYS))
    return {by: _relative(made, by, total) for by in WAYS}


def keeps(heads: int, cuts: Sequence[float] = CUTS) -> list[float]:
    """The shares that stay when at least so large a share of the heads goes, and at least one stays.

    >>> keeps(16), keeps(10, [0.25])  # of ten heads three go: two would be less than a quarter
    ([0.875, 0.75, 0.5, 0.25], [0.7])
    """
    return list(dict.fromkeys(max(1, heads - math.ceil(cut * heads)) / heads for cut in cuts))


def can_go(cuts: Sequence[tuple[float, float]], bar: float) -> float:
    """The largest share of heads that goes while the loss, and that of every smaller cut, stays within the bar.

    >>> can_go([(0.1, 0.002), (0.25, 0.02), (0.5, 0.004)], 0.01)
    0.1
    """
    share = 0.0
    for gone, more in sorted(cuts):
        if more >= bar:
            break
        share = gone
    return share


def points(lab: Lab) -> Iterator[Point]:
    """The usual model of every seed."""
    return (lab.point(seed) for seed in lab.seeds)


def measure(lab: Lab) -> Figures:
    """Every seed's model; heads are chosen on some held-out documents and judged by others."""
    choosing, judging = (lab.documents(lab.seeds[0] + more) for more in (1, 2))
    return _figures([more_loss(lab.made(point).model(), choosing, judging) for point in points(lab)])


def on(model: AnyModel, text: Any = None) -> Figures:
    """The same with a model and its text."""
    return _figures([more_loss(model, *read_on(model, text).first(TEXTS).halves())])


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    little, some = (figures[_share_name(bar), WAYS["ablation"]].values for bar in (LITTLE, SOME))
    enough, for_more = ([share >= MANY for share in shares] for shares in (little, some))
    if all(enough):
        blind = figures[_share_name(LITTLE), WAYS["random"]].mean
        return Verdict("holds", f"{np.mean(little):.0%} chosen by what they are worth, at random {blind:.0%}")
    if any(enough):
        return Verdict("depends", f"on the seed: between {min(little):.0%} and {max(little):.0%} can go")
    if any(for_more):
        told = f"{np.mean(little):.0%} can go for less than {LITTLE:.0%}, {np.mean(some):.0%} for less than {SOME:.0%}"
        return Verdict("depends", f"on what it may cost: {told} more loss")
    return Verdict("does not hold")


def _relative(made: Curve, by: str, heads: int) -> list[tuple[float, float]]:
    return [((heads - point.heads) / heads, point.more.mean / made.full.mean) for point in made.of(by)]


def _figures(found: list[dict[str, list[tuple[float, float]]]]) -> Figures:
    figures = Figures()
    for by, way in WAYS.items():
        for place, (gone, _) in enumerate(found[0][by]):
            figures.add(f"more loss, cut {way}", round(gone, 4), [one[by][place][1] for one in found])
    for bar in (LITTLE, SOME):
        for by, way in WAYS.items():
            figures.add(_share_name(bar), way, [can_go(one[by], bar) for one in found])
    return figures


def _share_name(bar: float) -> str:
    return f"share that can go for less than {bar:.0%} more loss"


CLAIM = Claim(
    number=15,
    name="cutting",
    says="Many heads of a trained model can be cut with hardly any loss.",
    against=f"A model that loses {LITTLE:.0%} or more as soon as a quarter of its heads, chosen by what they are "
    "worth, is gone.",
    setup="Heads of the usual trained model are ranked by ablation on held-out documents and cut, what they gave "
    f"on average left behind, until {', '.join(f'{cut:.0%}' for cut in CUTS)} are gone, rounded up to whole heads; the loss "
    "on other documents is compared with the full model's, and with cuts at random (three draws).",
    rule=f"What can go is the largest cut such that it and all smaller ones give less than {LITTLE:.0%} more loss. "
    f"Holds if it is a quarter of the heads or more in every seed, chosen by ablation; depends on the seed if in "
    f"some; depends on what it may cost if that many go for less than {SOME:.0%} in some seed; else does not hold.",
    measure=measure,
    judge=judge,
    picture=Picture(
        tuple(f"more loss, cut {way}" for way in WAYS.values()), x="share of heads cut", y="more loss, share"
    ),
    points=points,
    on=on,
)
