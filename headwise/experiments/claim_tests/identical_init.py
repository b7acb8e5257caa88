"""Specialisation comes from random initialisation: heads born equal stay equal."""

import math

import torch
from torch import Tensor

from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.heads import Head
from headwise.model import Transformer

INITS = ("twins", "half twins")
STEP_DIVISOR = 10  # a tenth of the usual steps is enough to see heads move
MAX_TWIN_DISTANCE, MIN_HALF_TWIN_DISTANCE = 0.01, 0.1  # of the distance between heads born apart


def relative_distance(first: Tensor, second: Tensor) -> float:
    """‖a − b‖ over the root mean square of both norms: 0 if they are the same, √2 if they are orthogonal and as long.

    >>> relative_distance(torch.tensor([3.0, 0.0]), torch.tensor([3.0, 0.0]))
    0.0
    >>> round(relative_distance(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])) ** 2, 6)
    2.0
    """
    first, second = first.detach().double(), second.detach().double()
    size = math.sqrt(float(first.square().sum() + second.square().sum()) / 2)
    return float((first - second).norm()) / size if size > 0 else 0.0


def weight_distance(first: Head, second: Head, projections: str = "QKVO") -> float:
    """The mean distance of two heads' weights, letter by letter."""
    return sum(
        relative_distance(getattr(first, f"W_{projection}"), getattr(second, f"W_{projection}"))
        for projection in projections
    ) / len(projections)


def mean_weight_distance(model: Transformer, first: int = 0, second: int = 1, projections: str = "QKVO") -> float:
    """The same of two heads by their numbers, on average over layers."""
    distances = [
        weight_distance(layer.heads[first], layer.heads[second], projections) for layer in model.attention_layers()
    ]
    return sum(distances) / len(distances)


def equal_weight_fraction(model: Transformer, first: int = 0, second: int = 1) -> float:
    """The share of two heads' weights that are equal to the last bit."""
    pairs = [(layer.heads[first], layer.heads[second]) for layer in model.attention_layers()]
    equal = [
        (getattr(a, f"W_{projection}") == getattr(b, f"W_{projection}")).flatten()
        for a, b in pairs
        for projection in "QKVO"
    ]
    return float(torch.cat(equal).double().mean())


def training_configs(experiment: ExperimentContext) -> list[ExperimentConfig]:
    """Short runs of both kinds of twins."""
    return [_short_config(experiment, seed, init) for init in INITS for seed in experiment.seeds]


def measure(experiment: ExperimentContext) -> StatisticTable:
    """Heads 0 and 1, born equal, beside heads 2 and 3 of the same model, which were not."""
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


def _short_config(experiment: ExperimentContext, seed: int, init: str) -> ExperimentConfig:
    return experiment.make_config(seed, init=init, recipe={"steps": max(8, experiment.size.steps // STEP_DIVISOR)})


def _model_at(trained: TrainedModel, step: int) -> Transformer:
    return trained.load_model(None if step == trained.config.recipe.steps else step)


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    twins, half_twins = (statistics["share of others' distance", init] for init in INITS)
    if twins.is_interval_below(MAX_TWIN_DISTANCE):
        if half_twins.is_interval_above(MIN_HALF_TWIN_DISTANCE):
            return Verdict("holds")
        if half_twins.is_interval_below(MIN_HALF_TWIN_DISTANCE):
            return Verdict("depends", "on how long they are trained: even twins that write elsewhere stay close")
        return Verdict("depends", "on the seed: twins stay together, how far half twins part stays open")
    if twins.is_interval_above(MIN_HALF_TWIN_DISTANCE):
        return Verdict("does not hold")
    if twins.is_interval_above(MAX_TWIN_DISTANCE):
        return Verdict("depends", "on rounding: twins drift apart, since sums are rounded in another order")
    return Verdict("depends", "on the seed: whether twins drift apart, as rounding may have it, stays open")


CLAIM = Claim(
    number=10,
    name="identical-init",
    statement="Heads specialise because they begin at different random weights; heads born equal stay equal.",
    counterevidence="Heads born equal in all their weights, without dropout, that come apart in training.",
    setup="Head 1 of every layer begins as a copy of head 0, W_O included (twins), or all but W_O (half twins); "
    f"1/{STEP_DIVISOR} of the usual steps, no dropout. The distance of their weights, relative to their size, is held "
    "against that of heads 2 and 3 of the same models, which began apart; of half twins what they read alone. How "
    "many weights are still equal to the last bit is told too: equal sums may be rounded differently, and rounding "
    "may grow.",
    rule=f"Holds if twins are surely nearer than {MAX_TWIN_DISTANCE:g} of others' distance, and half twins surely "
    f"further than {MIN_HALF_TWIN_DISTANCE:g} of it; does not hold if twins surely are further than "
    f"{MIN_HALF_TWIN_DISTANCE:g}. Else depends: on rounding if twins surely are further than {MAX_TWIN_DISTANCE:g}; on "
    f"the length of training if they surely are nearer and half twins surely nearer than {MIN_HALF_TWIN_DISTANCE:g}; "
    "else on the seed.",
    judged=statistic_key_selector("share of others' distance"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("twins apart", "half twins apart", "others apart"), x="step", y="distance of weights"),
    training_configs=training_configs,
)
