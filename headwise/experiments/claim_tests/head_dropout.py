"""Head dropout spreads reliance: no single head is needed as much."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headwise.analysis import default_corpus, importance
from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import ModelProtocol

DROPOUT = 0.2
MAX_COST_RATIO = 0.8  # largest cost of the worst head, relative to its cost without head dropout
MIN_GINI_DROP = 0.05  # smallest decrease of the Gini index of head costs
MAX_LOSS_INCREASE = 0.01  # relative increase of the loss from which the verdict mentions it


@dataclass(frozen=True)
class AblationSpread:
    """Cost of silencing single heads in nats per token: worst, mean, and how unevenly the costs are distributed."""

    worst: float
    mean: float
    top_fraction: float  # fraction of the total cost that is due to the worst head
    gini: float  # 0: all heads cost the same; near 1: one head has all the cost


def ablation_spread(model: ModelProtocol, text: Any = None) -> AblationSpread:
    """Silence every head in turn (zero ablation) and measure the loss increase on a text."""
    losses = importance(model, default_corpus(model) if text is None else text, ablation="zero").mean  # (heads,)
    positive = losses.clip(min=0)  # a head that increases the loss is not relied on
    return AblationSpread(
        float(losses.max()), float(losses.mean()), float(positive.max() / max(1e-12, positive.sum())), gini(positive)
    )


def gini(values: np.ndarray) -> float:
    """Return the Gini index: the mean absolute difference of two values over twice their mean.

    >>> gini(np.array([1.0, 1.0, 1.0])), gini(np.array([0.0, 0.0, 0.0, 1.0]))
    (0.0, 0.75)
    """
    if not values.sum():
        return 0.0
    return float(np.abs(values[:, None] - values[None]).mean() / (2 * values.mean()))


def training_configs(experiment: TrainedModelProvider) -> Iterator[ExperimentConfig]:
    """Return the default model of every seed, with and without head dropout."""
    return (
        config
        for seed in experiment.seeds
        for config in (experiment.make_config(seed), experiment.make_config(seed, head_dropout=DROPOUT))
    )


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure both models of every seed on the same held-out documents."""
    documents, names = experiment.held_out_corpus(), ("without", "with head dropout")
    trained = [
        (
            experiment.train_or_load(experiment.make_config(seed)),
            experiment.train_or_load(experiment.make_config(seed, head_dropout=DROPOUT)),
        )
        for seed in experiment.seeds
    ]
    spreads = [tuple(ablation_spread(run.load_model(), documents) for run in pair) for pair in trained]
    statistics = StatisticTable()
    for index, name in enumerate(names):
        statistics.add("loss", name, [pair[index].loss for pair in trained])
        for field in asdict(spreads[0][index]):
            statistics.add(STATISTIC_NAMES[field], name, [getattr(pair[index], field) for pair in spreads])
    statistics.add(
        "cost of the worst head, with over without", None, [b.worst / max(1e-12, a.worst) for a, b in spreads]
    )
    statistics.add("Gini index, with − without", None, [b.gini - a.gini for a, b in spreads])
    statistics.add("loss, with over without", None, [b.loss / a.loss for a, b in trained])
    return statistics


STATISTIC_NAMES = {
    "worst": "nats lost without the worst head",
    "mean": "nats lost without a head, on average",
    "top_fraction": "share of the worst head",
    "gini": "Gini index of what heads cost",
}


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    worst = statistics["cost of the worst head, with over without"]
    uneven = statistics["Gini index, with − without"]
    loss_increase = statistics["loss, with over without"].mean - 1
    confirmed = worst.is_interval_below(MAX_COST_RATIO), uneven.is_interval_below(-MIN_GINI_DROP)
    refuted = worst.is_interval_above(MAX_COST_RATIO), uneven.is_interval_above(-MIN_GINI_DROP)
    if all(confirmed):
        return Verdict(
            "holds", f"at a cost of {loss_increase:.1%} more loss" if loss_increase > MAX_LOSS_INCREASE else ""
        )
    if all(refuted):
        return Verdict("does not hold")
    findings = ("the worst head costs less", "heads are needed more evenly")
    unsure = [name for name, *outcomes in zip(findings, confirmed, refuted, strict=True) if not any(outcomes)]
    if unsure:
        return Verdict("undecided", f"whether {' and '.join(unsure)} is inconclusive")
    if confirmed[0]:
        return Verdict(
            "depends", "on the criterion: the worst head costs less, but heads are as unevenly needed as before"
        )
    return Verdict(
        "depends", "on the criterion: heads are needed more evenly, but the worst one costs as much as before"
    )


CLAIM = Claim(
    number=14,
    name="head-dropout",
    statement="Head dropout spreads reliance: a model trained with it relies less on any single head.",
    counterevidence="A model trained with head dropout whose worst single head costs as much as without, or whose head "
    "costs are as uneven.",
    setup=f"The default model trained with head dropout {DROPOUT:g} and without, with the same seed and text. Then every "
    "head is silenced in turn (zero ablation) on held-out documents.",
    rule="Paired by seed: holds if the worst head costs significantly less than "
    f"{MAX_COST_RATIO:g} times as much and the Gini index of head costs decreases by significantly more than "
    f"{MIN_GINI_DROP:g}. Does not hold if both are significantly false. Otherwise undecided if either is "
    f"inconclusive, else depends on the criterion. A loss increase of more than {MAX_LOSS_INCREASE:.0%} is mentioned.",
    judged=statistic_key_selector("cost of the worst head, with over without", "Gini index, with − without"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(tuple(STATISTIC_NAMES[name] for name in ("worst", "mean")), y="loss increase without one head, nats"),
    training_configs=training_configs,
)
