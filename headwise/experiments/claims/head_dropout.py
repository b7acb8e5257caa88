"""Head dropout spreads reliance: no single head is needed as much."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headwise.analysis.ablation.importance import importance
from headwise.analysis.recording.tokenized_corpus import documents_for
from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.model import AnyModel

RATE = 0.2
FALL = 0.8  # the worst head must cost at most so much of what it costs without head dropout
LESS = 0.05  # and the Gini index of what heads cost must fall by so much
PRICE = 0.01  # of the loss; a dearer one is told


@dataclass(frozen=True)
class Reliance:
    """What silencing single heads costs, nats a token: the dearest and the average one, and how uneven they are."""

    worst: float
    mean: float
    top: float  # the dearest head's share of what all cost
    gini: float  # 0: all cost the same; near 1: one costs all


def reliance(model: AnyModel, text: Any = None) -> Reliance:
    """Silence every head in turn, zero in its place, and measure what is lost on a text."""
    lost = importance(model, documents_for(model) if text is None else text, how="zero").mean  # (heads,)
    helps = lost.clip(min=0)  # a head that does harm is relied on by nobody
    return Reliance(float(lost.max()), float(lost.mean()), float(helps.max() / max(1e-12, helps.sum())), gini(helps))


def gini(values: np.ndarray) -> float:
    """How unevenly something is shared out: the mean difference of two values over twice their mean.

    >>> gini(np.array([1.0, 1.0, 1.0])), gini(np.array([0.0, 0.0, 0.0, 1.0]))
    (0.0, 0.75)
    """
    if not values.sum():
        return 0.0
    return float(np.abs(values[:, None] - values[None]).mean() / (2 * values.mean()))


def points(lab: Lab) -> Iterator[Point]:
    """The usual model of every seed, with and without."""
    return (point for seed in lab.seeds for point in (lab.point(seed), lab.point(seed, head_dropout=RATE)))


def measure(lab: Lab) -> Figures:
    """Both models of every seed on the same held-out documents."""
    documents, names = lab.documents(), ("without", "with head dropout")
    made = [(lab.made(lab.point(seed)), lab.made(lab.point(seed, head_dropout=RATE))) for seed in lab.seeds]
    found = [tuple(reliance(one.model(), documents) for one in pair) for pair in made]
    figures = Figures()
    for place, name in enumerate(names):
        figures.add("loss", name, [pair[place].loss for pair in made])
        for field in asdict(found[0][place]):
            figures.add(NAMES[field], name, [getattr(pair[place], field) for pair in found])
    figures.add("cost of the worst head, with over without", None, [b.worst / max(1e-12, a.worst) for a, b in found])
    figures.add("Gini index, with − without", None, [b.gini - a.gini for a, b in found])
    figures.add("loss, with over without", None, [b.loss / a.loss for a, b in made])
    return figures


NAMES = {
    "worst": "nats lost without the worst head",
    "mean": "nats lost without a head, on average",
    "top": "share of the worst head",
    "gini": "Gini index of what heads cost",
}


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    worst = figures["cost of the worst head, with over without"]
    uneven = figures["Gini index, with − without"]
    price = figures["loss, with over without"].mean - 1
    so = worst.below(FALL), uneven.below(-LESS)
    not_so = worst.above(FALL), uneven.above(-LESS)
    if all(so):
        return Verdict("holds", f"at a price of {price:.1%} more loss" if price > PRICE else "")
    if all(not_so):
        return Verdict("does not hold")
    what = ("the worst head costs less", "heads are needed more evenly")
    unsure = [name for name, *sure in zip(what, so, not_so, strict=True) if not any(sure)]
    if unsure:
        return Verdict("depends", f"on the seed: whether {' and '.join(unsure)} stays open")
    if so[0]:
        return Verdict(
            "depends", "on what is meant: the worst head costs less, but heads are as unevenly needed as before"
        )
    return Verdict(
        "depends", "on what is meant: heads are needed more evenly, but the worst one costs as much as before"
    )


CLAIM = Claim(
    number=14,
    name="head-dropout",
    says="Head dropout spreads reliance: a model trained with it leans less on any single head.",
    against="A model trained with head dropout whose worst single head costs as much as without, or whose heads "
    "are as unevenly needed.",
    setup=f"The usual model trained with head dropout {RATE:g} and without, same seed and text; then every head is "
    "silenced in turn, zero in its place, on held-out documents.",
    rule=f"Paired over seeds: holds if the worst head surely costs less than {FALL:g} times as much, and the Gini "
    f"index of what heads cost surely falls by more than {LESS:g}; does not hold if both surely are not so; else "
    f"depends, on the seed if either stays open. A price of more than {PRICE:.0%} of the loss is told.",
    asks=every("cost of the worst head, with over without", "Gini index, with − without"),
    measure=measure,
    judge=judge,
    picture=Picture(tuple(NAMES[name] for name in ("worst", "mean")), y="nats lost without one head"),
    points=points,
)
