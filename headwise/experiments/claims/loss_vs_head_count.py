"""Quality against the number of heads is a hill: worst at both ends, best in a broad middle."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import At, Figures
from headwise.experiments.experiment import Lab
from headwise.experiments.head_counts import head_counts

LEAST = 0.01  # nats: 1 % of perplexity
BROAD = 0.02  # nats: as near the best as this, a head count is part of the top
# Perplexity per wordpiece on newstest2013: https://arxiv.org/abs/1706.03762, table 3, rows (A) and base; width 512.
PUBLISHED = {1: 5.29, 4: 5.00, 8: 4.92, 16: 4.91, 32: 5.01}


def behind_the_best(losses: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """How far each head count lies behind the best one that is no end, seed by seed: losses by head count → the same.

    >>> behind_the_best({1: [3.0], 4: [2.0], 8: [1.5], 16: [2.5]})
    {1: [1.5], 4: [0.5], 8: [0.0], 16: [1.0]}
    """
    best = min(sorted(losses)[1:-1], key=lambda heads: sum(losses[heads]))
    return {heads: [a - b for a, b in zip(losses[heads], losses[best], strict=True)] for heads in losses}


def measure(lab: Lab) -> Figures:
    """The held-out loss of every head count, and how far behind the best of the middle it is."""
    losses = {h: [lab.made(lab.point(seed, h)).loss for seed in lab.seeds] for h in head_counts(lab.size.width)}
    figures = Figures()
    for heads, values in losses.items():
        figures.add("loss", heads, values)
    for heads, values in behind_the_best(losses).items():
        figures.add("behind the best", heads, values)
    for heads, perplexity in PUBLISHED.items():
        figures.add("published perplexity", heads, perplexity)
    return figures


def judge(figures: Figures) -> Verdict:
    """By `rule`."""
    behind = {heads: figure for heads, figure in figures.at("behind the best").items() if isinstance(heads, int)}
    one, *middle, most = sorted(behind)
    names = {one: "one head", most: "heads of one channel"}
    spared = [name for end, name in names.items() if behind[end].below(LEAST)]
    unsure = [name for end, name in names.items() if not behind[end].above(LEAST) and name not in spared]
    top = [heads for heads in middle if behind[heads].mean <= BROAD]
    told = f"{BROAD:g} nats from the best lie {', '.join(map(str, top))} heads"
    if unsure:
        open_ends = " or ".join(unsure)
        return Verdict("depends", f"on the seed: whether {open_ends} is worse than the best stays open; within {told}")
    if len(spared) == len(names):
        return Verdict("does not hold", f"neither end is worse; within {told}")
    if spared:
        return Verdict("depends", f"on the end: {spared[0]} is no worse than the best; within {told}")
    if 2 * len(top) < len(middle):
        return Verdict("depends", f"on the head count: the top is narrow; within {told}")
    return Verdict("holds", f"within {told}")


def _asks(figures: Figures) -> Iterator[tuple[str, At]]:
    """Both ends; the middle is judged by its means."""
    counts = sorted(heads for heads in figures.at("behind the best") if isinstance(heads, int))
    return (("behind the best", heads) for heads in (counts[0], counts[-1]))


def points(lab: Lab) -> Iterable[Point]:
    """Every head count of the sweep."""
    return [lab.point(seed, heads) for seed in lab.seeds for heads in head_counts(lab.size.width)]


CLAIM = Claim(
    number=6,
    name="hill",
    says="At a fixed width, quality against the number of heads is a hill: one head and the narrowest heads are worst, and a "
    "broad middle is best.",
    against="An end, one head or heads of a single channel, that does as well as the best of the middle; or a top that is a "
    "single head count.",
    setup="Small models of one width and as many parameters, heads 1, 2, 4 … up to one channel each, on the little language. "
    "At width 64 heads are 64 to 1 channels wide: that shows a shape, and that too narrow heads exist; it cannot say whether "
    "64 or 128 channels, or 8 to 32 heads, are best in wide models. The perplexities of Vaswani et al. (2017, table 3 A, "
    "width 512, English to German) stand beside it and are not judged.",
    rule=f"An end is worse if its held-out loss, paired by seed, lies surely more than {LEAST:g} nats a token above that of "
    "the best head count between the ends, and no worse if surely less. Depends on the seed if an end is "
    "neither; does not hold if both ends are no worse; depends if one is, or if fewer than half of the counts between the "
    f"ends lie within {BROAD:g} nats of the best (their means); else holds. That best is the one with the "
    "lowest mean of the same seeds, which favours the hill a little.",
    measure=measure,
    judge=judge,
    picture=Picture(("loss",), x="heads", y="held-out loss, nats a token", log=True),
    asks=_asks,
    points=points,
)
