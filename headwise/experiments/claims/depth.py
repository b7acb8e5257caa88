"""Fewer heads hurt more than slightly less depth, at equal parameters."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.depth import LAYERS, PART, deep, same_cut
from headwise.experiments.engine.experiment_config import Made, Point
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab

MODELS = ("full", "fewer layers", "fewer heads")
MATTERS = 0.01  # nats a token


def three(lab: Lab, seed: int) -> dict[str, Point]:
    """The deeper model, one block less, and as many parameters less by fewer heads."""
    full = deep(lab).point(seed)
    specs = (full.spec, *same_cut(full.spec))
    return {name: replace(full, spec=spec) for name, spec in zip(MODELS, specs, strict=True)}


def between_curves(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, float]:
    """How far one curve of losses lies above another: at the last step, and on average over training (the area between them).

    >>> between_curves({10: 3.0, 20: 2.0}, {10: 2.5, 20: 2.25})
    (-0.25, 0.125)
    """
    steps = sorted(one)
    gaps = [one[step] - other[step] for step in steps]
    if len(steps) < 2:
        return gaps[-1], gaps[-1]
    return gaps[-1], float(np.trapezoid(gaps, steps) / (steps[-1] - steps[0]))


def points(lab: Lab) -> Iterator[Point]:
    """Three models for every seed."""
    return (point for seed in lab.seeds for point in three(lab, seed).values())


def measure(lab: Lab) -> Figures:
    """The held-out loss of all three through training, and their paired differences."""
    made = [{name: lab.made(point) for name, point in three(lab, seed).items()} for seed in lab.seeds]
    curves = [{name: _curve(one) for name, one in models.items()} for models in made]
    figures = Figures()
    for name in MODELS:
        for step in curves[0][name]:
            figures.add(name, step, [one[name][step] for one in curves])
    for name in MODELS:
        figures.add("parameters", name, made[0][name].point.spec.parameters)
    for name in MODELS[1:]:
        gaps = [between_curves(one[name], one["full"]) for one in curves]
        figures.add("nats above the full model, at the end", name, [end for end, _ in gaps])
        figures.add("nats above the full model, over training", name, [area for _, area in gaps])
    gaps = [between_curves(one["fewer heads"], one["fewer layers"]) for one in curves]
    figures.add(GAP, "at the end", [end for end, _ in gaps])
    figures.add(GAP, "over training", [area for _, area in gaps])
    return figures


GAP = "nats of fewer heads above fewer layers"


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    gaps = figures.at(GAP)
    more = [str(when) for when, gap in gaps.items() if gap.above(MATTERS)]
    no_more = [str(when) for when, gap in gaps.items() if gap.below(MATTERS)]
    if len(more) == len(gaps):
        return Verdict("holds")
    if len(no_more) == len(gaps):
        other = all(gap.below(-MATTERS) for gap in gaps.values())
        return Verdict("does not hold", "less depth hurts more" if other else "")
    if more and no_more:
        return Verdict("depends", f"on when one looks: fewer heads hurt more {more[0]}, but not {no_more[0]}")
    return Verdict("depends", "on the seed: intervals reach to both sides of the bar")


def _curve(made: Made) -> dict[int, float]:
    """The loss at each step; a run that diverged knows as much as a guess."""
    recipe, guess = made.point.recipe, math.log(made.point.spec.vocab)
    steps = {*range(recipe.evaluate_every, recipe.steps, recipe.evaluate_every), recipe.steps}
    found = dict(made.curve)
    return {step: found.get(step, guess) for step in sorted(steps)}


CLAIM = Claim(
    number=16,
    name="depth",
    says="At equal parameters, fewer heads hurt more than slightly less depth.",
    against="A model with fewer heads that learns as well as one of the same size with a block less.",
    setup=f"A model of {LAYERS} layers, one with a block less, and one with as many parameters taken from it by "
    f"fewer heads in every layer (each head as wide as before), trained alike for {PART:.0%} of the usual steps; "
    "held-out loss all along.",
    rule="The loss with fewer heads minus that with fewer layers, paired over seeds, at the end and on average "
    f"over training: holds if both are surely above {MATTERS:g} nats a token, does not hold if both are surely "
    "below that, else depends.",
    asks=every(GAP),
    measure=measure,
    judge=judge,
    picture=Picture(MODELS, x="step", y="held-out loss, nats a token"),
    points=points,
)
