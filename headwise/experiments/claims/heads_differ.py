"""Heads end up different, and the more so the narrower they are."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from headwise.analysis.recording.tokenized_corpus import documents_for
from headwise.analysis.similarity.compare_heads import compare
from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import At, Figures
from headwise.experiments.experiment import Lab
from headwise.experiments.head_counts import head_counts, trends
from headwise.model import AnyModel

ROWS = 256  # on which maps are compared
SPACES = ("read_q", "read_k", "read_v", "write")
APART = 0.05  # nats of Jensen–Shannon divergence; maps that share nothing are ln 2 = .69 apart
ALIKE = 0.05  # of the way from chance to the same subspace
STEP = 0.01  # nats, a doubling of the head count


def differences(model: AnyModel, corpus: Any = None, rows: int = ROWS, seed: int = 0) -> dict[str, float]:
    """How far the heads of a layer are apart, on average over pairs and layers.

    `maps`: Jensen–Shannon divergence of their maps, in nats; `itself`: of one head's, at the same places of another text.
    `spaces`: how far what they read and write overlaps beyond chance, 0 as random subspaces do, 1 the same.
    """
    found = compare(model, corpus, rows=rows, seed=seed)
    layers = list(found.by_layer().values())
    inside = {name: float(np.nanmean([layer[name] for layer in layers])) for name in ("js", *SPACES)}
    chance = {name: float(found.nulls[name]) for name in SPACES}
    beyond = [(inside[name] - chance[name]) / (1 - chance[name]) for name in SPACES if np.isfinite(inside[name])]
    return {"maps": inside["js"], "itself": float(np.mean(found.nulls["js"])), "spaces": float(np.mean(beyond))}


def points(lab: Lab) -> list[Point]:
    """The usual model, and every head count from two on."""
    counts = dict.fromkeys((lab.size.heads, *head_counts(lab.size.width, fewest=2)))
    return [lab.point(seed, heads) for heads in counts for seed in lab.seeds]


def measure(lab: Lab) -> Figures:
    """The usual model before its first step and after its last; then every head count, after."""
    usual = [lab.made(lab.point(seed)) for seed in lab.seeds]
    texts = [lab.documents(seed) for seed in lab.seeds]
    before = [differences(made.model(0), some) for made, some in zip(usual, texts, strict=True)]
    after = [differences(made.model(), some) for made, some in zip(usual, texts, strict=True)]
    figures = _beside(before, after)
    by_count: dict[int, list[float]] = {}
    for heads in head_counts(lab.size.width, fewest=2):
        models = (lab.made(lab.point(seed, heads)).model() for seed in lab.seeds)
        made = [differences(model, some) for model, some in zip(models, texts, strict=True)]
        by_count[heads] = [one["maps"] for one in made]
        figures.add("maps apart, by heads", heads, by_count[heads])
        figures.add("spaces alike, by heads", heads, [one["spaces"] for one in made])
    return figures.add("maps apart, gained by a doubling of heads", None, trends(by_count))


def _asks(figures: Figures) -> Iterator[tuple[str, At]]:
    yield "maps apart, gained in training", None
    yield "spaces alike beyond chance", "trained"
    yield "maps apart, gained by a doubling of heads", None


def on(model: AnyModel, text: Any = None) -> Figures:
    """A model beside one of the same spec that has learned nothing; about head counts nothing can be said."""
    corpus = documents_for(model) if text is None else text
    return _beside([differences(model.untrained(0), corpus)], [differences(model, corpus)])


def _beside(before: list[dict[str, float]], after: list[dict[str, float]]) -> Figures:
    figures = Figures()
    for name, found in (("untrained", before), ("trained", after)):
        figures.add("maps apart", name, [one["maps"] for one in found])
        figures.add("spaces alike beyond chance", name, [one["spaces"] for one in found])
    figures.add("maps apart", "one head, two texts", [one["itself"] for one in after])
    pairs = list(zip(before, after, strict=True))
    return figures.add("maps apart, gained in training", None, [new["maps"] - old["maps"] for old, new in pairs])


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    parted = figures["maps apart, gained in training"]
    if not parted.above(APART):
        sure = parted.below(APART)
        return (
            Verdict("does not hold") if sure else Verdict("depends", "on the seed: how far maps part varies too much")
        )
    but, unsure = [], []
    spaces = figures["spaces alike beyond chance", "trained"]
    if not spaces.below(ALIKE):
        sure = spaces.above(ALIKE)
        (but if sure else unsure).append(f"their subspaces overlap more than {ALIKE:g} beyond chance")
    slopes = figures.at("maps apart, gained by a doubling of heads").values()
    if any(not slope.above(STEP) for slope in slopes):
        sure = any(slope.below(STEP) for slope in slopes)
        (but if sure else unsure).append(f"narrower heads differ {'no more' if sure else 'more'}")
    if but:
        return Verdict("depends", f"on what is compared: their maps part, but {' and '.join(but)}")
    if unsure:
        return Verdict("depends", f"on the seed: their maps part, but whether {' and '.join(unsure)} stays open")
    return Verdict("holds", "" if slopes else "head_dim was not compared")


CLAIM = Claim(
    number=8,
    name="differ",
    says="Heads end up different from each other, and the more so the smaller head_dim is.",
    against="Maps of a layer's heads as close after training as before, subspaces more alike than random ones, or a "
    "distance that does not grow as heads get narrower.",
    setup=f"Pairs of heads of one layer, before the first step and after the last: the Jensen–Shannon divergence of their "
    f"maps on {ROWS} rows of held-out text, and how far the subspaces they read and write overlap, as a share of the way "
    f"from chance, d/D, to 1. Then the distance of maps for every head count from two on, at one width.",
    rule=f"Does not hold if maps are surely less than {APART:g} nats further apart after training. Holds if surely more, the "
    f"overlap is surely less than {ALIKE:g} beyond chance and the distance surely grows by more than {STEP:g} nats for each "
    f"doubling of the head count (where head counts were compared). Else depends: on what is compared if maps surely part "
    f"but one of the others surely is not so, on the seed if that stays open.",
    asks=_asks,
    measure=measure,
    judge=judge,
    picture=Picture(("maps apart", "maps apart, by heads"), y="Jensen–Shannon divergence, nats"),
    points=points,
    on=on,
)
