"""The output projection matters: heads laid side by side and never mixed are not enough."""

from collections.abc import Iterable

from headwise.experiments.claim import Claim, PlotSpec, Verdict, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.experiment_context import ExperimentContext

MIN_LOSS = 0.02  # nats: 2 % of perplexity
LEARNED_OUTPUT = "learned"
INITS = {LEARNED_OUTPUT: "default", "frozen random": "frozen W_O", "identity": "identity W_O"}


def measure(experiment: ExperimentContext) -> StatisticTable:
    """Loss and right answers with each kind of W_O, and what the fixed ones cost."""
    statistics = StatisticTable()
    trained = {
        name: [experiment.train_or_load(experiment.make_config(seed, init=init)) for seed in experiment.seeds]
        for name, init in INITS.items()
    }
    for name, runs in trained.items():
        statistics.add("loss", name, [run.loss for run in runs])
        for relation in runs[0].probe_accuracy:
            statistics.add(f"right, {name}", relation, [run.probe_accuracy[relation] for run in runs])
        if name != LEARNED_OUTPUT:
            pairs = zip(runs, trained[LEARNED_OUTPUT], strict=True)
            statistics.add("lost", name, [run.loss - reference.loss for run, reference in pairs])
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    lost = statistics.by_condition("lost")
    costly = [str(name) for name, statistic in lost.items() if statistic.is_interval_above(MIN_LOSS)]
    cheap = [str(name) for name, statistic in lost.items() if statistic.is_interval_below(MIN_LOSS)]
    if len(costly) == len(lost):
        return Verdict("holds")
    if len(cheap) == len(lost):
        return Verdict("does not hold")
    unsure = [str(name) for name in lost if str(name) not in costly + cheap]
    groups = ((costly, "costs"), (cheap, "does not cost"), (unsure, "may cost, or not"))
    factor = "the seed" if unsure else "what stands in its place"
    return Verdict(
        "depends", f"on {factor}: " + "; ".join(f"{', '.join(names)} {text}" for names, text in groups if names)
    )


def training_configs(experiment: ExperimentContext) -> Iterable[ExperimentConfig]:
    """All three kinds."""
    return [experiment.make_config(seed, init=init) for seed in experiment.seeds for init in INITS.values()]


CLAIM = Claim(
    number=12,
    name="output-projection",
    statement="The output projection W_O matters: what heads found must be mixed, not merely laid side by side.",
    counterevidence="A model whose W_O is the identity, or random and never trained, and that is as good.",
    setup="The usual model with W_O learned; frozen as it was drawn (small random numbers); and frozen as the "
    "identity, so that head h writes to channels h·d to (h + 1)·d alone. All else is trained, W_V too, which can make "
    "up for much: what a head writes is x W_V W_O. The identity begins larger than a drawn W_O does; the fixed ones "
    "train 4096 parameters a layer fewer at width 64. Losses are paired by seed.",
    rule=f"Holds if both fixed ones surely lose more than {MIN_LOSS:g} nats a token; does not hold if both surely lose "
    "less; else depends, on the seed if either stays open.",
    judged=statistic_key_selector("lost"),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("lost",), y="loss above that of a learned W_O, nats a token"),
    training_configs=training_configs,
)
