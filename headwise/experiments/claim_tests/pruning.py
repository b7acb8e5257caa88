"""Many heads can be pruned after training."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headwise.analysis import eval_corpus
from headwise.compression import PruningCurves, pruning_curve
from headwise.errors import UnsupportedModelError
from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import ModelProtocol

PRUNED_FRACTIONS = (
    0.1,
    0.25,
    0.5,
    0.75,
)  # smallest fractions of heads to prune, rounded up to an integer number of heads
MIN_FRACTION = 0.25
SMALL_INCREASE, MODERATE_INCREASE = 0.01, 0.05  # relative increases of the loss
TEXTS = 64  # number of texts: one half to select heads, one half to evaluate the selection
RANKINGS = {"ablation": "by what they are worth", "random": "at random"}


def pruning_loss_increase_by_ranking(
    model: ModelProtocol, ranking_corpus: Any, test_corpus: Any, fractions: Sequence[float] = PRUNED_FRACTIONS
) -> dict[str, list[tuple[float, float]]]:
    """Return the pruned fraction and the relative loss increase, for heads selected by ablation and at random.

    Heads are ranked on one corpus, and the loss is measured on another. The mean outputs of pruned heads are folded into the
    bias.
    """
    if model.output is None:
        raise UnsupportedModelError(
            "model: without an output it has no loss to compare. Use a model that predicts tokens."
        )
    total = len(model.spec.head_addresses)
    prune_curve = pruning_curve(
        model, ranking_corpus, test_corpus, keep_fractions=keep_fractions(total, fractions), rankings=tuple(RANKINGS)
    )
    return {ranking: _relative_curve_points(prune_curve, ranking, total) for ranking in RANKINGS}


def keep_fractions(heads: int, pruned_fractions: Sequence[float] = PRUNED_FRACTIONS) -> list[float]:
    """Return the fractions to keep if at least these fractions are pruned, and at least one head is kept.

    >>> keep_fractions(16), keep_fractions(10, [0.25])  # 3 of 10 heads are pruned: 2 would be less than a quarter
    ([0.875, 0.75, 0.5, 0.25], [0.7])
    """
    return list(dict.fromkeys(max(1, heads - math.ceil(fraction * heads)) / heads for fraction in pruned_fractions))


def max_prunable_fraction(increases: Sequence[tuple[float, float]], threshold: float) -> float:
    """Return the largest pruned fraction for which it and all smaller fractions stay within the threshold.

    >>> max_prunable_fraction([(0.1, 0.002), (0.25, 0.02), (0.5, 0.004)], 0.01)
    0.1
    """
    fraction = 0.0
    for pruned_fraction, increase in sorted(increases):
        if increase >= threshold:
            break
        fraction = pruned_fraction
    return fraction


def training_configs(experiment: TrainedModelProvider) -> Iterator[ExperimentConfig]:
    """Return the default model of every seed."""
    return (experiment.make_config(seed) for seed in experiment.seeds)


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure the model of every seed. Heads are selected on some held-out documents and evaluated on others."""
    choosing, judging = (experiment.held_out_corpus(experiment.seeds[0] + offset) for offset in (1, 2))
    return _summarize(
        [
            pruning_loss_increase_by_ranking(experiment.train_or_load(config).load_model(), choosing, judging)
            for config in training_configs(experiment)
        ]
    )


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Measure the given model on a text."""
    return _summarize([pruning_loss_increase_by_ranking(model, *eval_corpus(model, text).first(TEXTS).halves())])


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    small, moderate = (
        statistics[_prunable_name(threshold), RANKINGS["ablation"]].values
        for threshold in (SMALL_INCREASE, MODERATE_INCREASE)
    )
    enough, for_more = ([fraction >= MIN_FRACTION for fraction in fractions] for fractions in (small, moderate))
    if all(enough):
        random_fraction = statistics[_prunable_name(SMALL_INCREASE), RANKINGS["random"]].mean
        return Verdict("holds", f"{np.mean(small):.0%} selected by importance, at random {random_fraction:.0%}")
    if any(enough):
        return Verdict("undecided", f"between {min(small):.0%} and {max(small):.0%} can be pruned")
    if any(for_more):
        details = (
            f"{np.mean(small):.0%} can be pruned for less than {SMALL_INCREASE:.0%}, "
            f"{np.mean(moderate):.0%} for less than {MODERATE_INCREASE:.0%}"
        )
        return Verdict("depends", f"on the accepted cost: {details} more loss")
    return Verdict("does not hold")


def _relative_curve_points(prune_curve: PruningCurves, ranking: str, heads: int) -> list[tuple[float, float]]:
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
            statistics.add_proportion(
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
    statement="Many heads of a trained model can be pruned with hardly any loss.",
    counterevidence=f"A model that loses {SMALL_INCREASE:.0%} or more as soon as a quarter of its heads, selected by "
    "importance, is pruned.",
    setup="Heads of the default trained model are ranked by ablation on held-out documents and pruned, with their mean "
    f"outputs folded into the bias, until {', '.join(f'{pruned_fraction:.0%}' for pruned_fraction in PRUNED_FRACTIONS)} are "
    "removed, rounded up to an integer. The loss on other documents is compared with that of the full model, and with "
    "random pruning (three draws).",
    rule=f"The prunable fraction is the largest one for which it and all smaller ones give less than {SMALL_INCREASE:.0%} "
    "more loss. Holds if it is at least a quarter of the heads in every seed, selected by ablation. Undecided if "
    "only in some. Depends on the accepted cost if that many can be pruned for less than "
    f"{MODERATE_INCREASE:.0%} in some seed. Otherwise does not hold.",
    primary=PrimaryQuantity(
        _prunable_name(SMALL_INCREASE), RANKINGS["ablation"], MIN_FRACTION, "above", planned_seeds=23
    ),
    version=2,
    measure=measure,
    judge=judge,
    plot=PlotSpec(
        tuple(f"more loss, cut {label}" for label in RANKINGS.values()),
        x="fraction of heads pruned",
        y="relative loss increase",
    ),
    training_configs=training_configs,
    measure_model=measure_model,
)
