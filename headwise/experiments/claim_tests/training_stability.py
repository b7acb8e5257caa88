"""Many heads make training more stable: less variation over seeds, and higher learning rates before it diverges."""

import math
from collections.abc import Iterable

import numpy as np

from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig, TrainedModel
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider

RATE_FACTORS = (5, 15)  # multiples of the default learning rate
STEPS, WARMUP = 320, 10
MIN_SAVING = 0.1  # nats that a high rate costs one head more than many
LOST_NATS = 0.5  # nats above the default rate from which a run has learned little


def loss_excess(trained: TrainedModel, reference: TrainedModel) -> float:
    """Return the final loss above the same model at the default rate. A diverged run gets the loss of a uniform guess."""
    return min(trained.loss, math.log(trained.config.spec.vocab)) - reference.loss


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure the cost of high rates with one head, the default number and four times as many, and the spread over seeds."""
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
        statistics.add_proportion("runs lost", heads, (excesses[heads] > LOST_NATS).mean(0).tolist())
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
    """Apply the rule of CLAIM."""
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
        return Verdict("undecided", f"whether high rates spare {_join(unsure)} heads is inconclusive")
    if wider:
        details = (
            f"high rates spare {_join(stable)} heads, but their losses spread further over seeds with {_join(wider)}"
        )
        return Verdict("depends", f"on what stable means: {details}")
    if refuted:
        return Verdict(
            "depends", f"on the head count: high rates significantly spare {_join(stable)} of {_join(spared)} heads"
        )
    if unsure:
        details = (
            f"high rates significantly spare {_join(stable)} heads, whether {_join(unsure)} as well is inconclusive"
        )
        return Verdict("undecided", details)
    spread_note = f"is less with {_join(narrower)}" if narrower else "shows no difference with this number of seeds"
    return Verdict("holds", f"high rates cost one head more; the spread over seeds {spread_note}")


def training_configs(experiment: TrainedModelProvider) -> Iterable[ExperimentConfig]:
    """Return short runs at three rates. With several seeds also full runs, which the sweep shares."""
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


def _heads(experiment: TrainedModelProvider) -> tuple[int, ...]:
    return 1, experiment.size.heads, min(4 * experiment.size.heads, experiment.size.width)


def _short_config(experiment: TrainedModelProvider, seed: int, heads: int, factor: float) -> ExperimentConfig:
    """Return a short run at a multiple of the default rate, with little warmup."""
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
    counterevidence="One head that tolerates high learning rates as well as many heads do, or losses that vary more over "
    "seeds with many heads.",
    setup=f"One head, the default number and four times as many: short runs ({STEPS} steps, {WARMUP} of warmup, gradients "
    f"clipped to norm 1) at the default rate and at {RATE_FACTORS[0]} and {RATE_FACTORS[1]} times that rate, and full runs "
    "at the default rate for the variation of losses over seeds, if there are several. Each seed has its own held-out "
    "documents, whose differences are part of that variation. A diverged run gets the loss of a uniform guess.",
    rule="The cost of high rates is the final loss above that of the same model at the default rate, averaged over both. "
    f"Does not hold if both larger head counts save significantly less than {MIN_SAVING:g} nats per token of the cost for "
    "one head (paired by seed). Undecided if neither saves significantly more. If one does: depends on what stable "
    "means if losses vary significantly more over seeds with many heads than with one (Fisher's F, which with few seeds "
    "detects only large ratios), on the head count if the other saves significantly less, undecided if that is "
    "inconclusive. Otherwise holds.",
    judged=statistic_key_selector("spared by many heads", "spread of one head over that of many"),
    primary=PrimaryQuantity("spared by many heads", 8, MIN_SAVING, "above", planned_seeds=7),
    version=2,
    measure=measure,
    judge=judge,
    plot=PlotSpec(("cost of high rates",), x="heads", y="nats above the default rate", log_x=True),
    training_configs=training_configs,
)
