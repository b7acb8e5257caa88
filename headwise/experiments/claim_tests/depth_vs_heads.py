"""Fewer heads hurt more than slightly less depth, at equal parameters."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.layers_or_heads_specs import (
    LAYERS,
    STEP_FRACTION,
    make_deep_experiment,
    reduce_layers_or_heads,
)
from headwise.experiments.trained_model_provider import TrainedModelProvider

MODELS = ("full", "fewer layers", "fewer heads")
MIN_GAP = 0.01  # nats per token


def equal_parameter_configs(experiment: TrainedModelProvider, seed: int) -> dict[str, ExperimentConfig]:
    """Return the deeper model, the model with one block less, and the model with fewer heads and as many parameters."""
    full = make_deep_experiment(experiment).make_config(seed)
    specs = (full.spec, *reduce_layers_or_heads(full.spec))
    return {name: replace(full, spec=spec) for name, spec in zip(MODELS, specs, strict=True)}


def final_and_mean_gap(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[float, float]:
    """Return the difference between two loss curves at the last step, and its mean over training.

    >>> final_and_mean_gap({10: 3.0, 20: 2.0}, {10: 2.5, 20: 2.25})
    (-0.25, 0.125)
    """
    steps = sorted(first)
    gaps = [first[step] - second[step] for step in steps]
    if len(steps) < 2:
        return gaps[-1], gaps[-1]
    return gaps[-1], float(np.trapezoid(gaps, steps) / (steps[-1] - steps[0]))


def training_configs(experiment: TrainedModelProvider) -> Iterator[ExperimentConfig]:
    """Return three models per seed."""
    return (config for seed in experiment.seeds for config in equal_parameter_configs(experiment, seed).values())


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure the held-out loss of all three models during training, and their paired differences."""
    trained = [
        {name: experiment.train_or_load(config) for name, config in equal_parameter_configs(experiment, seed).items()}
        for seed in experiment.seeds
    ]
    curves = [{name: _curve(entry) for name, entry in models.items()} for models in trained]
    statistics = StatisticTable()
    for name in MODELS:
        for step in curves[0][name]:
            statistics.add(name, step, [entry[name][step] for entry in curves])
    for name in MODELS:
        statistics.add("parameters", name, trained[0][name].config.spec.num_parameters)
    for name in MODELS[1:]:
        gaps = [final_and_mean_gap(entry[name], entry["full"]) for entry in curves]
        statistics.add("nats above the full model, at the end", name, [end for end, _ in gaps])
        statistics.add("nats above the full model, over training", name, [area for _, area in gaps])
    gaps = [final_and_mean_gap(entry["fewer heads"], entry["fewer layers"]) for entry in curves]
    statistics.add(GAP, "at the end", [end for end, _ in gaps])
    statistics.add(GAP, "over training", [area for _, area in gaps])
    return statistics


GAP = "nats of fewer heads above fewer layers"


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    gaps = statistics.by_condition(GAP)
    worse = [str(phase) for phase, gap in gaps.items() if gap.is_interval_above(MIN_GAP)]
    not_worse = [str(phase) for phase, gap in gaps.items() if gap.is_interval_below(MIN_GAP)]
    if len(worse) == len(gaps):
        return Verdict("holds")
    if len(not_worse) == len(gaps):
        opposite = all(gap.is_interval_below(-MIN_GAP) for gap in gaps.values())
        return Verdict("does not hold", "less depth hurts more" if opposite else "")
    if worse and not_worse:
        return Verdict("depends", f"on when it is measured: fewer heads hurt more {worse[0]}, but not {not_worse[0]}")
    return Verdict("undecided", "an interval includes the threshold")


def _curve(trained: TrainedModel) -> dict[int, float]:
    """Return the loss by step. A diverged run gets the loss of a uniform guess."""
    recipe, guess = trained.config.recipe, math.log(trained.config.spec.vocab)
    steps = {*range(recipe.evaluate_every, recipe.steps, recipe.evaluate_every), recipe.steps}
    losses = dict(trained.loss_curve)
    return {step: losses.get(step, guess) for step in sorted(steps)}


CLAIM = Claim(
    number=16,
    name="depth",
    statement="At equal parameters, fewer heads hurt more than slightly less depth.",
    counterevidence="A model with fewer heads that learns as well as a model of equal size with one block less.",
    setup=f"A model of {LAYERS} layers, a model with one block less, and a model with about as many parameters removed by "
    f"fewer heads in every layer (at constant head_dim), all trained in the same way for {STEP_FRACTION:.0%} of the default "
    "steps. The held-out loss is measured during training.",
    rule="The loss with fewer heads minus the loss with fewer layers, paired by seed, at the end and on average over "
    f"training: holds if both are significantly above {MIN_GAP:g} nats per token, does not hold if both are significantly "
    "below, depends on when it is measured if one is above and one below, else undecided.",
    judged=statistic_key_selector(GAP),
    primary=PrimaryQuantity(GAP, "at the end", 2 * MIN_GAP, "above", planned_seeds=10),
    measure=measure,
    judge=judge,
    plot=PlotSpec(MODELS, x="step", y="held-out loss, nats per token"),
    training_configs=training_configs,
)
