"""Quality versus the number of heads has a peak: worst at both ends, best in a broad middle."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict
from headwise.experiments.compared_head_counts import head_counts
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider

ENDS = "mean loss of both ends above the mean of the counts between"
MIN_GAP = 0.01  # nats, about 1% of perplexity
PLATEAU = 0.02  # nats: head counts this close to the best belong to the plateau
# Perplexity per wordpiece on newstest2013: https://arxiv.org/abs/1706.03762, table 3, rows (A) and base; width 512.
PUBLISHED = {1: 5.29, 4: 5.00, 8: 4.92, 16: 4.91, 32: 5.01}


def gap_to_best_middle_count(losses: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """Return the loss above the best head count between the two ends, per seed.

    >>> gap_to_best_middle_count({1: [3.0], 4: [2.0], 8: [1.5], 16: [2.5]})
    {1: [1.5], 4: [0.5], 8: [0.0], 16: [1.0]}
    """
    best = min(sorted(losses)[1:-1], key=lambda heads: sum(losses[heads]))
    return {heads: [a - b for a, b in zip(losses[heads], losses[best], strict=True)] for heads in losses}


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure the held-out loss of every head count, and its gap to the best head count between the ends."""
    losses = {
        h: [experiment.train_or_load(experiment.make_config(seed, h)).loss for seed in experiment.seeds]
        for h in head_counts(experiment.size.width)
    }
    statistics = StatisticTable()
    for heads, values in losses.items():
        statistics.add("loss", heads, values)
    for heads, values in gap_to_best_middle_count(losses).items():
        statistics.add("behind the best", heads, values)
    smallest, *middle, largest = sorted(losses)
    above = np.mean([losses[h] for h in (smallest, largest)], 0) - np.mean([losses[h] for h in middle], 0)  # (seeds,)
    statistics.add(ENDS, None, above.tolist())
    for heads, perplexity in PUBLISHED.items():
        statistics.add("published perplexity", heads, perplexity)
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    gaps = {
        heads: statistic
        for heads, statistic in statistics.by_condition("behind the best").items()
        if isinstance(heads, int)
    }
    min_heads, *middle, max_heads = sorted(gaps)
    names = {min_heads: "one head", max_heads: "heads of one channel"}
    not_worse = [name for end, name in names.items() if gaps[end].is_interval_below(MIN_GAP)]
    unsure = [name for end, name in names.items() if not gaps[end].is_interval_above(MIN_GAP) and name not in not_worse]
    plateau = [heads for heads in middle if gaps[heads].mean <= PLATEAU]
    plateau_text = f"{PLATEAU:g} nats from the best lie {', '.join(map(str, plateau))} heads"
    if unsure:
        open_ends = " or ".join(unsure)
        return Verdict(
            "undecided", f"whether {open_ends} is worse than the best is inconclusive; within {plateau_text}"
        )
    if len(not_worse) == len(names):
        return Verdict("does not hold", f"neither end is worse; within {plateau_text}")
    if not_worse:
        return Verdict("depends", f"on the end: {not_worse[0]} is not worse than the best; within {plateau_text}")
    if 2 * len(plateau) < len(middle):
        return Verdict("depends", f"on the head count: the plateau is narrow; within {plateau_text}")
    return Verdict("holds", f"within {plateau_text}")


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    """Select both ends. The middle is judged by its means."""
    counts = sorted(heads for heads in statistics.by_condition("behind the best") if isinstance(heads, int))
    return (("behind the best", heads) for heads in (counts[0], counts[-1]))


def training_configs(experiment: TrainedModelProvider) -> Iterable[ExperimentConfig]:
    """Return every head count of the sweep."""
    return [
        experiment.make_config(seed, heads) for seed in experiment.seeds for heads in head_counts(experiment.size.width)
    ]


CLAIM = Claim(
    number=6,
    name="loss-vs-head-count",
    statement="At a fixed width, quality versus the number of heads has a peak: one head and the narrowest heads are "
    "worst, and a broad middle is best.",
    counterevidence="An end, one head or heads of a single channel, that is as good as the best of the middle, or a "
    "plateau that is a single head count.",
    setup="Small models of one width and equal parameter count, with heads 1, 2, 4 … up to one channel each, on the "
    "synthetic language. At width 64 heads are 64 to 1 channels wide. This shows the shape of the curve, and that heads "
    "can be too narrow. It cannot show whether 64 or 128 channels, or 8 to 32 heads, are best in wide models. The "
    "perplexities of Vaswani et al. (2017, table 3 A, width 512, English to German) are reported but not judged.",
    rule=f"An end is worse if its held-out loss, paired by seed, is significantly more than {MIN_GAP:g} nats per token above "
    "that of the best head count between the ends, and not worse if significantly less. Undecided if an end is "
    "inconclusive. Does not hold if both ends are not worse. Depends if one end is not worse, or if fewer than half of the "
    f"counts between the ends are within {PLATEAU:g} nats of the best (by their means). Otherwise holds. The best count is "
    "selected by the mean of the same seeds, which slightly favors the claim.",
    primary=PrimaryQuantity(ENDS, None, 0.0, "above", planned_seeds=53),
    version=2,
    measure=measure,
    judge=judge,
    plot=PlotSpec(("loss",), x="heads", y="held-out loss, nats per token", log_x=True),
    judged=_judged_statistics,
    training_configs=training_configs,
)
