"""Heads do not partition the embedding: each reads all of it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headwise.analysis.similarity.weight_similarity import READS, compare_weights, folded_heads
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.diversity import diversity
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import At, Figures
from headwise.experiments.experiment import Lab
from headwise.model import AnyModel

LEAST = 0.02  # nats: 2 % of perplexity
SHARED = 0.5  # of the overlap that subspaces drawn at random have
FULL, SLICED, WIDER = "full input", "slices", "slices with wider MLPs"


def input_overlap(model: AnyModel) -> float:
    """How much the spaces that heads of a layer read overlap, over chance: 1 as if drawn at random, 0 a partition.

    Mean of queries, keys and values over the pairs of each layer; norms before a layer are folded into its weights. What
    heads share by construction, as the keys of a group, is left out.
    """
    spec, found = model.spec.attention, []
    chance = {"read_q": spec.head_dim, "read_k": spec.head_dim, "read_v": spec.value_dim}
    with torch.no_grad():
        for site in model.sites():
            made = compare_weights(folded_heads(model, site.addresses))
            apart = ~np.eye(len(site.addresses), dtype=bool)
            found += [np.nanmean(made[name][apart]) * spec.width / chance[name] for name in _not_shared(made, apart)]
    if not found:
        raise HeadwiseError("no layer of this model has two heads, so there is no overlap; give one with more heads.")
    return float(np.mean(found))


def own_slice(model: AnyModel) -> float:
    """The share of a head's reading weights, squared, that lies in its own slice of the channels, over chance.

    1: its slice is to it as any other; as many as there are heads: it reads that slice alone.
    """
    shares = []
    with torch.no_grad():
        for head in model.heads:
            heads, number = model.spec.attention.heads, head.address.head
            low, high = (model.spec.width * n // heads for n in (number, number + 1))
            square = torch.cat([head.W_Q, head.W_K, head.W_V], 1).float().square().sum(1)  # (D,)
            shares.append(float(square[low:high].mean() / square.mean()))
    return float(np.mean(shares))


def measure(lab: Lab) -> Figures:
    """The usual model beside one whose heads read a slice each, and one that makes up for the parameters in its MLPs."""
    figures, texts = Figures(), lab.documents()
    made = {name: [lab.made(point) for point in some] for name, some in _points(lab).items()}
    for name, some in made.items():
        figures.add("loss", name, [one.loss for one in some])
        figures.add("parameters", name, some[0].point.spec.parameters)
        for relation in some[0].marks:
            figures.add(f"right, {name}", relation, [one.marks[relation] for one in some])
        models = [one.model() for one in some]
        figures.add("maps apart (JS)", name, [diversity(model, texts)["js"] for model in models])
        figures.add("overlap of what heads read, over chance", name, [input_overlap(model) for model in models])
        figures.add("weight in the own slice, over chance", name, [own_slice(model) for model in models])
    for name in (SLICED, WIDER):
        pairs = zip(made[name], made[FULL], strict=True)
        figures.add("lost by slices", name, [one.loss - other.loss for one, other in pairs])
    return figures


def on(model: AnyModel, text: Any = None) -> Figures:
    """What the heads of a model read, by their weights."""
    figures = Figures().add("overlap of what heads read, over chance", FULL, input_overlap(model))
    return figures.add("weight in the own slice, over chance", FULL, own_slice(model))


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    overlap = figures["overlap of what heads read, over chance", FULL]
    told = f"what heads read overlaps {overlap.mean:.2f} times as much as by chance"
    if overlap.below(SHARED):
        return Verdict("does not hold", told)
    if not overlap.above(SHARED):
        return Verdict("depends", f"on the seed: {told}, and the interval covers {SHARED:g}")
    lost = {str(name): figure for name, figure in figures.at("lost by slices").items()}
    spared = [name for name, figure in lost.items() if figure.below(LEAST)]
    unsure = [name for name, figure in lost.items() if not figure.above(LEAST) and name not in spared]
    if spared:
        told = f"heads read overlapping spaces, but {' and '.join(spared)} lose less than {LEAST:g} nats"
        return Verdict("depends", f"on what is asked: {told}")
    if unsure:
        told = f"heads read overlapping spaces, but whether {' and '.join(unsure)} lose more than {LEAST:g} nats stays open"
        return Verdict("depends", f"on the seed: {told}")
    return Verdict("holds")


def _asks(figures: Figures) -> Iterator[tuple[str, At]]:
    yield "overlap of what heads read, over chance", FULL
    yield from (("lost by slices", name) for name in figures.at("lost by slices"))


def points(lab: Lab) -> Iterable[Point]:
    """All three kinds."""
    return [point for some in _points(lab).values() for point in some]


def _points(lab: Lab) -> dict[str, list[Point]]:
    full, sliced = [lab.point(seed) for seed in lab.seeds], [lab.point(seed, input="slice") for seed in lab.seeds]
    return {FULL: full, SLICED: sliced, WIDER: [_wider(a, b) for a, b in zip(sliced, full, strict=True)]}


def _wider(point: Point, other: Point) -> Point:
    """A point with MLPs so wide that it has as many parameters as another."""
    spec = point.spec
    missing = other.spec.parameters - spec.parameters
    more = round(missing / (spec.layers * (2 * spec.width + spec.mlp_bias)))
    return replace(point, spec=replace(spec, hidden=spec.hidden + more))


def _not_shared(made: dict[str, np.ndarray], apart: np.ndarray) -> list[str]:
    """What heads read that they do not all share."""
    return [name for name in READS if np.isfinite(made[name][apart]).any()]


CLAIM = Claim(
    number=11,
    name="slices",
    says="Heads do not partition the embedding: each reads all of it through projections of its own, and that matters.",
    against="Heads whose reading spaces hardly overlap; or models whose heads read a slice of the embedding each and are as "
    "good.",
    setup="The usual model, beside one whose head h sees channels h·d to (h + 1)·d alone, and beside that one with MLPs so "
    "wide that parameters are as many (slices save most of W_Q, W_K and W_V). Losses are paired by seed; overlap is the mean "
    "Σ cos² of principal angles between what two heads of a layer read, over that of random subspaces.",
    rule=f"Does not hold if what heads read overlaps surely less than {SHARED:g} times as much as by chance, depends on the "
    "seed if neither surely less nor surely more. If more, holds if slices, with fewer parameters and with as many, surely "
    f"lose more than {LEAST:g} nats a token; depends on what is asked if one of them surely loses less, else on the seed. On "
    "a given model the overlap alone decides.",
    asks=_asks,
    measure=measure,
    judge=judge,
    picture=Picture(("loss", "overlap of what heads read, over chance"), y="nats a token; times chance"),
    points=points,
    on=on,
)
