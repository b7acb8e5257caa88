"""Specialization comes from random initialization: heads with equal initial weights stay equal."""

import math

import torch
from torch import Tensor

from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import Head
from headwise.model import Transformer

INITS = ("twins", "half twins")
STEP_DIVISOR = 10  # a tenth of the default steps is enough to see heads change
MAX_TWIN_DISTANCE, MIN_HALF_TWIN_DISTANCE = (
    0.01,
    0.1,
)  # relative to the distance between heads with different initial weights


def relative_distance(first: Tensor, second: Tensor) -> float:
    """Return ‖a − b‖ over the root mean square of both norms: 0 if equal, √2 if orthogonal and of equal length.

    >>> relative_distance(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 0.0]))
    0.0
    >>> round(relative_distance(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])) ** 2, 6)
    2.0
    """
    first, second = first.detach().double(), second.detach().double()
    size = math.sqrt(float(first.square().sum() + second.square().sum()) / 2)
    return float((first - second).norm()) / size if size > 0 else 0.0


def weight_distance(first: Head, second: Head, projections: str = "QKVO") -> float:
    """Return the mean distance between the weights of two heads over the projections."""
    return sum(
        relative_distance(getattr(first, f"W_{projection}"), getattr(second, f"W_{projection}"))
        for projection in projections
    ) / len(projections)


def mean_weight_distance(model: Transformer, first: int = 0, second: int = 1, projections: str = "QKVO") -> float:
    """Return the mean weight distance of two heads, given by number, over layers."""
    distances = [
        weight_distance(layer.heads[first], layer.heads[second], projections) for layer in model.attention_layers()
    ]
    return sum(distances) / len(distances)


def equal_weight_fraction(model: Transformer, first: int = 0, second: int = 1) -> float:
    """Return the fraction of the weights of two heads that are bitwise equal."""
    pairs = [(layer.heads[first], layer.heads[second]) for layer in model.attention_layers()]
    equal = [
        (getattr(a, f"W_{projection}") == getattr(b, f"W_{projection}")).flatten()
        for a, b in pairs
        for projection in "QKVO"
    ]
    return float(torch.cat(equal).double().mean())


def training_configs(experiment: TrainedModelProvider) -> list[ExperimentConfig]:
    """Return short runs of both kinds of twins."""
    return [_short_config(experiment, seed, init) for init in INITS for seed in experiment.seeds]


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Compare heads 0 and 1, initialized equally, with heads 2 and 3 of the same model, initialized differently."""
    statistics = StatisticTable()
    for init in INITS:
        projections = "QKVO" if init == "twins" else "QKV"  # half twins differ in W_O from the start
        trained = [experiment.train_or_load(_short_config(experiment, seed, init)) for seed in experiment.seeds]
        for step in (*trained[0].config.checkpoint_steps, trained[0].config.recipe.steps):
            models = [_model_at(run, step) for run in trained]
            statistics.add(f"{init} apart", step, [mean_weight_distance(model, 0, 1, projections) for model in models])
            if init == "twins":
                statistics.add(
                    "others apart", step, [mean_weight_distance(model, 2, 3, projections) for model in models]
                )
        final_models = [run.load_model() for run in trained]
        ratios = [
            mean_weight_distance(model, 0, 1, projections) / mean_weight_distance(model, 2, 3, projections)
            for model in final_models
        ]
        statistics.add("share of others' distance", init, ratios)
        if init == "twins":
            statistics.add(
                "weights equal to the last bit", None, [equal_weight_fraction(model) for model in final_models]
            )
    return statistics


def _short_config(experiment: TrainedModelProvider, seed: int, init: str) -> ExperimentConfig:
    return experiment.make_config(seed, init=init, recipe={"steps": max(8, experiment.size.steps // STEP_DIVISOR)})


def _model_at(trained: TrainedModel, step: int) -> Transformer:
    return trained.load_model(None if step == trained.config.recipe.steps else step)


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    twins, half_twins = (statistics["share of others' distance", init] for init in INITS)
    if twins.is_interval_below(MAX_TWIN_DISTANCE):
        if half_twins.is_interval_above(MIN_HALF_TWIN_DISTANCE):
            return Verdict("holds")
        if half_twins.is_interval_below(MIN_HALF_TWIN_DISTANCE):
            return Verdict("depends", "on how long they are trained: even twins with different W_O stay close")
        return Verdict("undecided", "twins stay together, the distance of half twins is inconclusive")
    if twins.is_interval_above(MIN_HALF_TWIN_DISTANCE):
        return Verdict("does not hold")
    if twins.is_interval_above(MAX_TWIN_DISTANCE):
        return Verdict("depends", "on rounding: twins drift apart, because sums are rounded in a different order")
    return Verdict("undecided", "whether twins drift apart, possibly by rounding, is inconclusive")


CLAIM = Claim(
    number=10,
    name="identical-init",
    statement="Heads specialize because they start from different random weights. Equally initialized heads stay equal.",
    counterevidence="Heads with equal initial weights, trained without dropout, that become different.",
    setup="Head 1 of every layer is initialized as a copy of head 0, including W_O (twins) or without W_O (half twins). "
    f"Training takes 1/{STEP_DIVISOR} of the default steps, without dropout. The distance of their weights, relative to "
    "their size, is compared with the distance of heads 2 and 3 of the same models, which were initialized differently. "
    "For half twins only W_Q, W_K and W_V are compared. The fraction of bitwise equal weights is also reported: equal sums "
    "may be rounded differently, and rounding errors may grow.",
    rule=f"Distances are relative to that of the other heads. Holds if twins are significantly closer than "
    f"{MAX_TWIN_DISTANCE:g} and half twins significantly further than {MIN_HALF_TWIN_DISTANCE:g}. Does not hold if twins "
    f"are significantly further than {MIN_HALF_TWIN_DISTANCE:g}. Otherwise depends: on rounding if twins are significantly "
    f"further than {MAX_TWIN_DISTANCE:g}, on the length of training if they are significantly closer and half twins "
    f"significantly closer than {MIN_HALF_TWIN_DISTANCE:g}, else undecided.",
    judged=statistic_key_selector("share of others' distance"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("twins apart", "half twins apart", "others apart"), x="step", y="distance of weights"),
    training_configs=training_configs,
)
