"""Many heads make training more stable: less spread over seeds, and higher rates before it breaks."""

import math
from collections.abc import Iterable

import numpy as np

from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.experiment_context import ExperimentContext

RATE_FACTORS = (5, 15)  # times the usual rate
STEPS, WARMUP = 320, 10
MIN_SAVING = 0.1  # nats that a high rate costs one head more than many
LOST_NATS = 0.5  # nats above the usual rate: such a run has learned little


def loss_excess(trained: TrainedModel, reference: TrainedModel) -> float:
    """How far a run ended above the same model at the usual rate; one that diverged knows no more than to guess."""
    return min(trained.loss, math.log(trained.config.spec.vocab)) - reference.loss


def measure(experiment: ExperimentContext) -> StatisticTable:
    """What high rates cost with one head, with the usual number and with four times as many; and the spread over seeds."""
    statistics, excesses = StatisticTable(), {}
    for heads in _heads(experiment):
        reference_runs = [
            experiment.train_or_load(_short_config(experiment, seed, heads, 1)) for seed in experiment.seeds
        ]
        fast_runs = [
            [experiment.train_or_load(_short_config(experiment, seed, heads, factor)) for seed in experiment.seeds]
            for factor in RATE_FACTORS
        ]
        for factor, runs in zip((1, *RATE_FACTORS), (reference_runs, *fast_runs), strict=True):
            name = "loss, one head" if heads == 1 else f"loss, {heads} heads"
            statistics.add(name, experiment.size.learning_rate * factor, [run.loss for run in runs])
        excesses[heads] = np.array(
            [[loss_excess(*pair) for pair in zip(runs, reference_runs, strict=True)] for runs in fast_runs]
        )  # (rates, seeds)
        statistics.add("runs lost", heads, (excesses[heads] > LOST_NATS).mean(0).tolist())
        statistics.add("cost of high rates", heads, excesses[heads].mean(0).tolist())
    single_head, *more_heads = excesses
    for heads in more_heads:
        statistics.add("spared by many heads", heads, (excesses[single_head] - excesses[heads]).mean(0).tolist())
    if len(experiment.seeds) > 1:
        losses = {
            heads: [experiment.train_or_load(experiment.make_config(seed, heads)).loss for seed in experiment.seeds]
            for heads in excesses
        }
        for heads, values in losses.items():
            statistics.add("spread over seeds", heads, float(np.std(values, ddof=1)))
        for heads in more_heads:
            statistics.add(
                "spread of one head over that of many",
                heads,
                Statistic.spread_ratio(losses[single_head], losses[heads]),
            )
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    spared = statistics.by_condition("spared by many heads")
    stable = [heads for heads, statistic in spared.items() if statistic.is_interval_above(MIN_SAVING)]
    ratios = statistics.by_condition("spread of one head over that of many")
    wider = [heads for heads, statistic in ratios.items() if statistic.is_interval_below(1)]
    narrower = [heads for heads, statistic in ratios.items() if statistic.is_interval_above(1)]
    refuted = [heads for heads, statistic in spared.items() if statistic.is_interval_below(MIN_SAVING)]
    unsure = [heads for heads in spared if heads not in (*stable, *refuted)]
    if len(refuted) == len(spared):
        return Verdict("does not hold")
    if not stable:
        return Verdict("depends", f"on the seed: whether high rates spare {_join(unsure)} heads stays open")
    if wider:
        details = (
            f"high rates spare {_join(stable)} heads, but their losses spread further over seeds with {_join(wider)}"
        )
        return Verdict("depends", f"on what stable means: {details}")
    if refuted:
        return Verdict("depends", f"on how many: high rates surely spare {_join(stable)} of {_join(spared)} heads")
    if unsure:
        details = f"high rates surely spare {_join(stable)} heads, whether {_join(unsure)} as well stays open"
        return Verdict("depends", f"on the seed: {details}")
    spread_note = f"is less with {_join(narrower)}" if narrower else "shows no difference, of so few"
    return Verdict("holds", f"high rates cost one head more; the spread over seeds {spread_note}")


def training_configs(experiment: ExperimentContext) -> Iterable[ExperimentConfig]:
    """Short runs at three rates; with several seeds also whole ones, which the sweep has anyway."""
    short_configs = [
        _short_config(experiment, seed, h, factor)
        for seed in experiment.seeds
        for h in _heads(experiment)
        for factor in (1, *RATE_FACTORS)
    ]
    return short_configs + [
        experiment.make_config(seed, h)
        for seed in experiment.seeds
        for h in _heads(experiment)
        if len(experiment.seeds) > 1
    ]


def _heads(experiment: ExperimentContext) -> tuple[int, ...]:
    return 1, experiment.size.heads, min(4 * experiment.size.heads, experiment.size.width)


def _short_config(experiment: ExperimentContext, seed: int, heads: int, factor: float) -> ExperimentConfig:
    """A short run at so many times the usual rate, and with hardly a warm-up."""
    steps = min(STEPS, experiment.size.steps)
    settings = {"steps": steps, "warmup": min(WARMUP, steps // 2), "evaluate_every": steps, "save_every": steps}
    return experiment.make_config(
        seed, heads, recipe={**settings, "learning_rate": experiment.size.learning_rate * factor}
    )


def _join(counts: Iterable[object]) -> str:
    return " and ".join(map(str, counts))


CLAIM = Claim(
    number=23,
    name="stability",
    statement="Many heads make training more stable.",
    counterevidence="One head that bears high learning rates as well as many do; or losses that spread further over "
    "seeds with many.",
    setup=f"One head, the usual number and four times as many: short runs ({STEPS} steps, {WARMUP} of warm-up, "
    f"gradients clipped to length 1) at the usual rate and at {RATE_FACTORS[0]} and {RATE_FACTORS[1]} times that; "
    "whole runs at the usual rate for the spread of losses over seeds, where there are several. Each seed has "
    "held-out documents of its own, whose differences are part of that spread. A run that diverged counts as one that "
    "guesses.",
    rule="The cost of high rates is how far runs end above the same model at the usual rate, averaged over both. Does "
    f"not hold if both larger head counts surely save less than {MIN_SAVING:g} nats a token of what they cost one head "
    "(paired by seed); else depends on the seed if neither surely saves more. If one does, depends on what stable "
    "means if losses spread surely further over seeds with many heads than with one (Fisher's F; of few seeds only a "
    "manifold spread would show), on how many if the other surely saves less, on the seed if that stays open. Else "
    "holds.",
    judged=statistic_key_selector("spared by many heads", "spread of one head over that of many"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("cost of high rates",), x="heads", y="nats above the usual rate", log_x=True),
    training_configs=training_configs,
)
