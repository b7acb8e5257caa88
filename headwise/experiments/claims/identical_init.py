"""Specialisation comes from random initialisation: heads born equal stay equal."""

import math

import torch
from torch import Tensor

from headwise.experiments.claim import Claim, Picture, Verdict, every
from headwise.experiments.engine.experiment_config import Made, Point
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import Lab
from headwise.heads import Head
from headwise.model import Transformer

STARTS = ("twins", "half twins")
PART = 10  # a tenth of the usual steps is enough to see heads move
TOGETHER, APART = 0.01, 0.1  # of the distance between heads born apart


def distance(one: Tensor, other: Tensor) -> float:
    """‖a − b‖ over the root mean square of both norms: 0 if they are the same, √2 if they are orthogonal and as long.

    >>> distance(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 0.0]))
    0.0
    >>> round(distance(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])) ** 2, 6)
    2.0
    """
    one, other = one.detach().double(), other.detach().double()
    size = math.sqrt(float(one.square().sum() + other.square().sum()) / 2)
    return float((one - other).norm()) / size if size > 0 else 0.0


def apart(one: Head, other: Head, letters: str = "QKVO") -> float:
    """The mean distance of two heads' weights, letter by letter."""
    return sum(distance(getattr(one, f"W_{c}"), getattr(other, f"W_{c}")) for c in letters) / len(letters)


def layers_apart(model: Transformer, one: int = 0, other: int = 1, letters: str = "QKVO") -> float:
    """The same of two heads by their numbers, on average over layers."""
    found = [apart(layer.heads[one], layer.heads[other], letters) for layer in model.attention_layers()]
    return sum(found) / len(found)


def same_bits(model: Transformer, one: int = 0, other: int = 1) -> float:
    """The share of two heads' weights that are equal to the last bit."""
    pairs = [(layer.heads[one], layer.heads[other]) for layer in model.attention_layers()]
    equal = [(getattr(a, f"W_{c}") == getattr(b, f"W_{c}")).flatten() for a, b in pairs for c in "QKVO"]
    return float(torch.cat(equal).double().mean())


def points(lab: Lab) -> list[Point]:
    """Short runs of both kinds of twins."""
    return [_point(lab, seed, start) for start in STARTS for seed in lab.seeds]


def measure(lab: Lab) -> Figures:
    """Heads 0 and 1, born equal, beside heads 2 and 3 of the same model, which were not."""
    figures = Figures()
    for start in STARTS:
        letters = "QKVO" if start == "twins" else "QKV"  # half twins differ in W_O from the start
        made = [lab.made(_point(lab, seed, start)) for seed in lab.seeds]
        for step in (*made[0].point.watch, made[0].point.recipe.steps):
            models = [_at(one, step) for one in made]
            figures.add(f"{start} apart", step, [layers_apart(model, 0, 1, letters) for model in models])
            if start == "twins":
                figures.add("others apart", step, [layers_apart(model, 2, 3, letters) for model in models])
        last = [one.model() for one in made]
        shares = [layers_apart(model, 0, 1, letters) / layers_apart(model, 2, 3, letters) for model in last]
        figures.add("share of others' distance", start, shares)
        if start == "twins":
            figures.add("weights equal to the last bit", None, [same_bits(model) for model in last])
    return figures


def _point(lab: Lab, seed: int, start: str) -> Point:
    return lab.point(seed, start=start, recipe={"steps": max(8, lab.size.steps // PART)})


def _at(made: Made, step: int) -> Transformer:
    return made.model(None if step == made.point.recipe.steps else step)


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    twins, half = (figures["share of others' distance", start] for start in STARTS)
    if twins.below(TOGETHER):
        if half.above(APART):
            return Verdict("holds")
        if half.below(APART):
            return Verdict("depends", "on how long they are trained: even twins that write elsewhere stay close")
        return Verdict("depends", "on the seed: twins stay together, how far half twins part stays open")
    if twins.above(APART):
        return Verdict("does not hold")
    if twins.above(TOGETHER):
        return Verdict("depends", "on rounding: twins drift apart, since sums are rounded in another order")
    return Verdict("depends", "on the seed: whether twins drift apart, as rounding may have it, stays open")


CLAIM = Claim(
    number=10,
    name="twins",
    says="Heads specialise because they begin at different random weights; heads born equal stay equal.",
    against="Heads born equal in all their weights, without dropout, that come apart in training.",
    setup=f"Head 1 of every layer begins as a copy of head 0, W_O included (twins), or all but W_O (half twins); 1/{PART} of "
    f"the usual steps, no dropout. The distance of their weights, relative to their size, is held against that of heads 2 "
    f"and 3 of the same models, which began apart; of half twins what they read alone. How many weights are still equal to "
    f"the last bit is told too: equal sums may be rounded differently, and rounding may grow.",
    rule=f"Holds if twins are surely nearer than {TOGETHER:g} of others' distance, and half twins surely further than "
    f"{APART:g} of it; does not hold if twins surely are further than {APART:g}. Else depends: on rounding if twins surely "
    f"are further than {TOGETHER:g}; on the length of training if they surely are nearer and half twins surely nearer than "
    f"{APART:g}; else on the seed.",
    asks=every("share of others' distance"),
    measure=measure,
    judge=judge,
    picture=Picture(("twins apart", "half twins apart", "others apart"), x="step", y="distance of weights"),
    points=points,
)
