"""Many heads can be cut after training."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headwise.analysis import eval_corpus
from headwise.compression import PruningCurve, pruning_curve
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.model import ModelProtocol

PRUNED_FRACTIONS = (0.1, 0.25, 0.5, 0.75)  # shares of the heads that go, rounded up to whole heads: at least so many
MIN_FRACTION = 0.25
SMALL_INCREASE, MODERATE_INCREASE = 0.01, 0.05  # more loss, as a share of the full model's
TEXTS = 64  # of a given text: half to choose heads on, half to judge the choice by
RANKINGS = {"ablation": "by what they are worth", "random": "at random"}


def pruning_loss_increase_by_ranking(
    model: ModelProtocol, ranking_corpus: Any, test_corpus: Any, fractions: Sequence[float] = PRUNED_FRACTIONS
) -> dict[str, list[tuple[float, float]]]:
    """For heads chosen by ablation and at random: the share that went, and how much more loss that gave, as a share.

    Heads are ranked on one corpus, and the loss is measured on another; what they gave on average stays.
    """
    if model.output is None:
        raise HeadwiseError("a model without an output has no loss to compare; give one that predicts tokens.")
    total = len(model.spec.head_addresses)
    prune_curve = pruning_curve(
        model, ranking_corpus, test_corpus, keep_fractions=keep_fractions(total, fractions), rankings=tuple(RANKINGS)
    )
    return {ranking: _relative(prune_curve, ranking, total) for ranking in RANKINGS}


def keep_fractions(heads: int, pruned_fractions: Sequence[float] = PRUNED_FRACTIONS) -> list[float]:
    """The shares that stay when at least so large a share of the heads goes, and at least one stays.

    >>> keep_fractions(16), keep_fractions(10, [0.25])  # of ten heads three go: two would be less than a quarter
    ([0.875, 0.75, 0.5, 0.25], [0.7])
    """
    return list(dict.fromkeys(max(1, heads - math.ceil(fraction * heads)) / heads for fraction in pruned_fractions))


def max_prunable_fraction(increases: Sequence[tuple[float, float]], threshold: float) -> float:
    """The largest share of heads that goes while the loss, and that of every smaller cut, stays within the bar.

    >>> max_prunable_fraction([(0.1, 0.002), (0.25, 0.02), (0.5, 0.004)], 0.01)
    0.1
    """
    fraction = 0.0
    for pruned_fraction, increase in sorted(increases):
        if increase >= threshold:
            break
        fraction = pruned_fraction
    return fraction


def training_configs(experiment: ExperimentContext) -> Iterator[ExperimentConfig]:
    """The usual model of every seed."""
    return (experiment.make_config(seed) for seed in experiment.seeds)


def measure(experiment: ExperimentContext) -> StatisticTable:
    """Every seed's model; heads are chosen on some held-out documents and judged by others."""
    choosing, judging = (experiment.held_out_corpus(experiment.seeds[0] + offset) for offset in (1, 2))
    return _summarize(
        [
            pruning_loss_increase_by_ranking(experiment.train_or_load(config).load_model(), choosing, judging)
            for config in training_configs(experiment)
        ]
    )


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """The same with a model and its text."""
    return _summarize([pruning_loss_increase_by_ranking(model, *eval_corpus(model, text).first(TEXTS).halves())])


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    small, moderate = (
        statistics[_prunable_name(threshold), RANKINGS["ablation"]].values
        for threshold in (SMALL_INCREASE, MODERATE_INCREASE)
    )
    enough, for_more = ([fraction >= MIN_FRACTION for fraction in fractions] for fractions in (small, moderate))
    if all(enough):
        random_fraction = statistics[_prunable_name(SMALL_INCREASE), RANKINGS["random"]].mean
        return Verdict("holds", f"{np.mean(small):.0%} chosen by what they are worth, at random {random_fraction:.0%}")
    if any(enough):
        return Verdict("depends", f"on the seed: between {min(small):.0%} and {max(small):.0%} can go")
    if any(for_more):
        details = (
            f"{np.mean(small):.0%} can go for less than {SMALL_INCREASE:.0%}, "
            f"{np.mean(moderate):.0%} for less than {MODERATE_INCREASE:.0%}"
        )
        return Verdict("depends", f"on what it may cost: {details} more loss")
    return Verdict("does not hold")


def _relative(prune_curve: PruningCurve, ranking: str, heads: int) -> list[tuple[float, float]]:
    return [
        ((heads - curve_point.heads) / heads, curve_point.loss_increase.mean / prune_curve.full_loss.mean)
        for curve_point in prune_curve.points_by_ranking(ranking)
    ]


def _summarize(results: list[dict[str, list[tuple[float, float]]]]) -> StatisticTable:
    statistics = StatisticTable()
    for ranking, label in RANKINGS.items():
        for index, (pruned_fraction, _) in enumerate(results[0][ranking]):
            statistics.add(
                f"more loss, cut {label}", round(pruned_fraction, 4), [result[ranking][index][1] for result in results]
            )
    for threshold in (SMALL_INCREASE, MODERATE_INCREASE):
        for ranking, label in RANKINGS.items():
            statistics.add(
                _prunable_name(threshold),
                label,
                [max_prunable_fraction(result[ranking], threshold) for result in results],
            )
    return statistics


def _prunable_name(threshold: float) -> str:
    return f"share that can go for less than {threshold:.0%} more loss"


CLAIM = Claim(
    number=15,
    name="pruning",
    statement="Many heads of a trained model can be cut with hardly any loss.",
    counterevidence=f"A model that loses {SMALL_INCREASE:.0%} or more as soon as a quarter of its heads, chosen by "
    "what they are worth, is gone.",
    setup="Heads of the usual trained model are ranked by ablation on held-out documents and cut, what they gave on "
    f"average left behind, until {', '.join(f'{pruned_fraction:.0%}' for pruned_fraction in PRUNED_FRACTIONS)} are "
    "gone, rounded up to whole heads; the loss on other documents is compared with the full model's, and with cuts at "
    "random (three draws).",
    rule=f"What can go is the largest cut such that it and all smaller ones give less than {SMALL_INCREASE:.0%} more "
    "loss. Holds if it is a quarter of the heads or more in every seed, chosen by ablation; depends on the seed if in "
    f"some; depends on what it may cost if that many go for less than {MODERATE_INCREASE:.0%} in some seed; else does "
    "not hold.",
    measure=measure,
    judge=judge,
    plot=PlotSpec(
        tuple(f"more loss, cut {label}" for label in RANKINGS.values()), x="share of heads cut", y="more loss, share"
    ),
    training_configs=training_configs,
    measure_model=measure_model,
)
