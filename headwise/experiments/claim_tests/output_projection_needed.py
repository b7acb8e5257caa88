"""The output projection matters: heads that are concatenated and never mixed are not enough."""

from collections.abc import Iterable

from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider

MIN_LOSS = 0.02  # nats, about 2% of perplexity
LEARNED_OUTPUT = "learned"
INITS = {LEARNED_OUTPUT: "default", "frozen random": "frozen W_O", "identity": "identity W_O"}


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure loss and accuracy with each kind of W_O, and the cost of the fixed ones."""
    statistics = StatisticTable()
    trained = {
        name: [experiment.train_or_load(experiment.make_config(seed, init=init)) for seed in experiment.seeds]
        for name, init in INITS.items()
    }
    for name, runs in trained.items():
        statistics.add("loss", name, [run.loss for run in runs])
        for relation in runs[0].probe_accuracy:
            statistics.add_proportion(f"right, {name}", relation, [run.probe_accuracy[relation] for run in runs])
        if name != LEARNED_OUTPUT:
            pairs = zip(runs, trained[LEARNED_OUTPUT], strict=True)
            statistics.add("lost", name, [run.loss - reference.loss for run, reference in pairs])
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    lost = statistics.by_condition("lost")
    costly = [str(name) for name, statistic in lost.items() if statistic.is_interval_above(MIN_LOSS)]
    cheap = [str(name) for name, statistic in lost.items() if statistic.is_interval_below(MIN_LOSS)]
    if len(costly) == len(lost):
        return Verdict("holds")
    if len(cheap) == len(lost):
        return Verdict("does not hold")
    unsure = [str(name) for name in lost if str(name) not in costly + cheap]
    groups = ((costly, "costs"), (cheap, "does not cost"), (unsure, "may cost, or not"))
    summary = "; ".join(f"{', '.join(names)} {text}" for names, text in groups if names)
    return Verdict("undecided", summary) if unsure else Verdict("depends", f"on the replacement of W_O: {summary}")


def training_configs(experiment: TrainedModelProvider) -> Iterable[ExperimentConfig]:
    """Return all three kinds of models."""
    return [experiment.make_config(seed, init=init) for seed in experiment.seeds for init in INITS.values()]


CLAIM = Claim(
    number=12,
    name="output-projection",
    statement="The output projection W_O matters: the outputs of heads must be mixed, not only concatenated.",
    counterevidence="A model whose W_O is the identity, or random and never trained, and that is as good.",
    setup="The default model with a learned W_O, with W_O frozen at its random initialization (small values), and with W_O "
    "frozen at the identity, so that head h writes only to channels h·d to (h + 1)·d. All other weights are trained, "
    "including W_V, which can compensate for much: a head writes x W_V W_O. The identity has larger values than a random "
    "W_O. At width 64 the frozen models train 4096 fewer parameters per layer. Losses are paired by seed.",
    rule=f"Holds if both frozen models lose significantly more than {MIN_LOSS:g} nats per token. Does not hold if both lose "
    "significantly less. Otherwise undecided if either is inconclusive, else depends on the replacement.",
    judged=statistic_key_selector("lost"),
    primary=PrimaryQuantity("lost", "frozen random", MIN_LOSS, "above", planned_seeds=64),
    version=2,
    measure=measure,
    judge=judge,
    plot=PlotSpec(("lost",), y="loss above that of a learned W_O, nats per token"),
    training_configs=training_configs,
)
