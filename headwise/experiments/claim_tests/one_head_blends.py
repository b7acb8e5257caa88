"""One head must blend relations that several heads keep apart."""

from collections.abc import Iterable, Iterator

from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.experiments.lookup_task import STEPS, OffsetLookupTask, train_and_evaluate_lookups

TASK = OffsetLookupTask(offsets=(1, 2, 3, 4))
HEADS = (1, 2, 4, 8)
MIN_LEARNED, MAX_BLENDED = 0.95, 0.5  # shares of places with all look-ups right
MIN_DIFFERENCE = 0.05  # a share of right answers that counts


def measure(experiment: ExperimentContext) -> StatisticTable:
    """Answers on the synthetic language with one head and with the usual number; then look-ups for every head count."""
    statistics = StatisticTable()
    single, multiple = (
        [experiment.train_or_load(experiment.make_config(seed, heads)).probe_accuracy for seed in experiment.seeds]
        for heads in (1, None)
    )
    for relation in multiple[0]:
        pairs = [(a[relation], b[relation]) for a, b in zip(single, multiple, strict=True)]
        statistics.add("right with one head", relation, [a for a, _ in pairs])
        statistics.add("right with many heads", relation, [b for _, b in pairs])
        statistics.add("lost by one head", relation, [b - a for a, b in pairs])
    width, steps = experiment.size.width, min(STEPS, experiment.size.steps)
    for name, hidden, counts in (("", 0, HEADS), (", MLP behind", 4 * width, HEADS[:-1])):
        for heads in counts:
            accuracies = [
                train_and_evaluate_lookups(heads, TASK, width=width, hidden=hidden, steps=steps, seed=seed)
                for seed in experiment.seeds
            ]
            statistics.add(f"look-ups right{name}", heads, [accuracy for accuracy, _ in accuracies])
            statistics.add(f"all look-ups right{name}", heads, [all_correct for _, all_correct in accuracies])
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    blended, lookup_text = _judge_lookups(statistics)
    lost = {str(name): statistic for name, statistic in statistics.by_condition("lost by one head").items()}
    worse = [name for name, statistic in lost.items() if statistic.is_interval_above(MIN_DIFFERENCE)]
    better = [name for name, statistic in lost.items() if statistic.is_interval_below(-MIN_DIFFERENCE)]
    unsure = [
        name
        for name, statistic in lost.items()
        if name not in worse and not statistic.is_interval_below(MIN_DIFFERENCE)
    ]
    loss_text = f"one head loses {', '.join(worse) or 'no relation for sure'}"
    if blended and worse and not better:
        return Verdict("holds", loss_text)
    if blended is False and not worse and not unsure:
        return Verdict("does not hold", lookup_text)
    gain_text = f", does better at {', '.join(better)}" if better else ""
    open_text = f"; open: {', '.join(unsure)}" if unsure else ""
    factor = "seed" if blended is None or (unsure and not worse) else "relation"
    return Verdict("depends", f"on the {factor}: {loss_text}{gain_text}{open_text}; {lookup_text}")


def _judge_lookups(statistics: StatisticTable) -> tuple[bool | None, str]:
    """Whether look-ups bear it out, surely do not, or leave it open (None); and in words."""
    num_lookups, accuracy_by_heads = len(TASK.offsets), statistics.by_condition("all look-ups right")
    single, multiple = accuracy_by_heads[1], [accuracy_by_heads[heads] for heads in _sufficient_heads(statistics)]
    if single.is_interval_above(MAX_BLENDED):
        return False, f"{num_lookups} look-ups at once go through one"
    if any(statistic.is_interval_below(MIN_LEARNED) for statistic in multiple):
        return False, f"{num_lookups} look-ups at once are not learned by {num_lookups} heads or more either"
    if single.is_interval_below(MAX_BLENDED) and all(
        statistic.is_interval_above(MIN_LEARNED) for statistic in multiple
    ):
        return True, f"{num_lookups} look-ups at once do not go through one"
    return (
        None,
        f"whether {num_lookups} look-ups at once go through one and through {num_lookups} heads or more stays open",
    )


def _sufficient_heads(statistics: StatisticTable) -> list[int]:
    """Head counts that could keep every look-up apart."""
    accuracy_by_heads = statistics.by_condition("all look-ups right")
    return [heads for heads in accuracy_by_heads if isinstance(heads, int) and heads >= len(TASK.offsets)]


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    """Every relation, since losing any of them counts, and the look-ups that are judged."""
    yield from (("lost by one head", relation) for relation in statistics.by_condition("lost by one head"))
    yield from (("all look-ups right", heads) for heads in (1, *_sufficient_heads(statistics)))


def training_configs(experiment: ExperimentContext) -> Iterable[ExperimentConfig]:
    """One head and the usual number."""
    return [experiment.make_config(seed, heads) for seed in experiment.seeds for heads in (1, None)]


CLAIM = Claim(
    number=5,
    name="one-head-blends",
    statement="One head must blend relations: it has one map of attention, and what several heads keep apart runs "
    "together in it.",
    counterevidence="A model with one head of the same width and as many parameters that gets every relation right as "
    "often; or one head whose output still tells several look-ups apart.",
    setup="Models of the synthetic language with one head and with many, same width and parameters, examined on each "
    f"relation; and a single layer that must name the symbols {', '.join(map(str, TASK.offsets))} places back at once, "
    "read out linearly, with 1 to 8 heads of one width. The same with an MLP before the readout is shown and not "
    "judged: it can unpick much of a blend, as the models' own MLPs can.",
    rule=f"Look-ups bear it out if all of them are right at surely more than {MIN_LEARNED:.0%} of places with as many "
    f"heads as look-ups or more, and at surely fewer than {MAX_BLENDED:.0%} with one; they do not if one of these "
    f"surely is the other way round. Holds if they do, one head surely loses more than {MIN_DIFFERENCE:.0%} of right "
    "answers in some relation, and surely gains as much in none. Does not hold if they do not and one head surely "
    f"loses less than {MIN_DIFFERENCE:.0%} in every relation. Else depends: on the seed if look-ups leave it open, or "
    "if no relation is surely lost and some may be; or on the relation. Any relation will do, so intervals are "
    "widened for all of them together.",
    judged=_judged_statistics,
    measure=measure,
    judge=judge,
    plot=PlotSpec(
        ("all look-ups right", "all look-ups right, MLP behind"),
        x="heads",
        y="places where all four look-ups are right",
        log_x=True,
    ),
    training_configs=training_configs,
)
