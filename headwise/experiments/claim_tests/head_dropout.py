"""Head dropout spreads reliance: no single head is needed as much."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headwise.analysis import default_corpus, importance
from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.model import ModelProtocol

DROPOUT = 0.2
MAX_COST_RATIO = 0.8  # the worst head must cost at most so much of what it costs without head dropout
MIN_GINI_DROP = 0.05  # and the Gini index of what heads cost must fall by so much
MAX_LOSS_INCREASE = 0.01  # of the loss; a dearer one is told


@dataclass(frozen=True)
class AblationSpread:
    """What silencing single heads costs, nats a token: the dearest and the average one, and how uneven they are."""

    worst: float
    mean: float
    top_fraction: float  # the dearest head's share of what all cost
    gini: float  # 0: all cost the same; near 1: one costs all


def ablation_spread(model: ModelProtocol, text: Any = None) -> AblationSpread:
    """Silence every head in turn, zero in its place, and measure what is lost on a text."""
    losses = importance(model, default_corpus(model) if text is None else text, ablation="zero").mean  # (heads,)
    positive = losses.clip(min=0)  # a head that does harm is relied on by nobody
    return AblationSpread(
        float(losses.max()), float(losses.mean()), float(positive.max() / max(1e-12, positive.sum())), gini(positive)
    )


def gini(values: np.ndarray) -> float:
    """How unevenly something is shared out: the mean difference of two values over twice their mean.

    >>> gini(np.array([1.0, 1.0, 1.0])), gini(np.array([0.0, 0.0, 0.0, 1.0]))
    (0.0, 0.75)
    """
    if not values.sum():
        return 0.0
    return float(np.abs(values[:, None] - values[None]).mean() / (2 * values.mean()))


def training_configs(experiment: ExperimentContext) -> Iterator[ExperimentConfig]:
    """The usual model of every seed, with and without."""
    return (
        config
        for seed in experiment.seeds
        for config in (experiment.make_config(seed), experiment.make_config(seed, head_dropout=DROPOUT))
    )


def measure(experiment: ExperimentContext) -> StatisticTable:
    """Both models of every seed on the same held-out documents."""
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
    """By `rule`."""
    worst = statistics["cost of the worst head, with over without"]
    uneven = statistics["Gini index, with − without"]
    loss_increase = statistics["loss, with over without"].mean - 1
    confirmed = worst.is_interval_below(MAX_COST_RATIO), uneven.is_interval_below(-MIN_GINI_DROP)
    refuted = worst.is_interval_above(MAX_COST_RATIO), uneven.is_interval_above(-MIN_GINI_DROP)
    if all(confirmed):
        return Verdict(
            "holds", f"at a price of {loss_increase:.1%} more loss" if loss_increase > MAX_LOSS_INCREASE else ""
        )
    if all(refuted):
        return Verdict("does not hold")
    findings = ("the worst head costs less", "heads are needed more evenly")
    unsure = [name for name, *outcomes in zip(findings, confirmed, refuted, strict=True) if not any(outcomes)]
    if unsure:
        return Verdict("depends", f"on the seed: whether {' and '.join(unsure)} stays open")
    if confirmed[0]:
        return Verdict(
            "depends", "on what is meant: the worst head costs less, but heads are as unevenly needed as before"
        )
    return Verdict(
        "depends", "on what is meant: heads are needed more evenly, but the worst one costs as much as before"
    )


CLAIM = Claim(
    number=14,
    name="head-dropout",
    statement="Head dropout spreads reliance: a model trained with it leans less on any single head.",
    counterevidence="A model trained with head dropout whose worst single head costs as much as without, or whose "
    "heads are as unevenly needed.",
    setup=f"The usual model trained with head dropout {DROPOUT:g} and without, same seed and text; then every head is "
    "silenced in turn, zero in its place, on held-out documents.",
    rule=f"Paired over seeds: holds if the worst head surely costs less than {MAX_COST_RATIO:g} times as much, and the "
    f"Gini index of what heads cost surely falls by more than {MIN_GINI_DROP:g}; does not hold if both surely are not "
    f"so; else depends, on the seed if either stays open. A price of more than {MAX_LOSS_INCREASE:.0%} of the loss is "
    "told.",
    judged=statistic_key_selector("cost of the worst head, with over without", "Gini index, with − without"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(tuple(STATISTIC_NAMES[name] for name in ("worst", "mean")), y="nats lost without one head"),
    training_configs=training_configs,
)
