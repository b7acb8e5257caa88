"""One head must blend relations that several heads keep separate."""

from collections.abc import Iterable, Iterator

from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable
from headwise.experiments.offset_lookup_task import STEPS, OffsetLookupTask, train_and_evaluate_lookups
from headwise.experiments.trained_model_provider import TrainedModelProvider

TASK = OffsetLookupTask(offsets=(1, 2, 3, 4))
HEADS = (1, 2, 4, 8)
MIN_LEARNED, MAX_BLENDED = 0.95, 0.5  # fractions of positions with all lookups correct
MIN_DIFFERENCE = 0.05  # smallest difference in accuracy that counts


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure accuracy on the synthetic language with one head and the default number, then lookups for every head count."""
    statistics = StatisticTable()
    single, multiple = (
        [experiment.train_or_load(experiment.make_config(seed, heads)).probe_accuracy for seed in experiment.seeds]
        for heads in (1, None)
    )
    for relation in multiple[0]:
        pairs = [(a[relation], b[relation]) for a, b in zip(single, multiple, strict=True)]
        statistics.add_proportion("right with one head", relation, [a for a, _ in pairs])
        statistics.add_proportion("right with many heads", relation, [b for _, b in pairs])
        statistics.add("lost by one head", relation, [b - a for a, b in pairs])
    width, steps = experiment.size.width, min(STEPS, experiment.size.steps)
    for name, hidden, counts in (("", 0, HEADS), (", MLP behind", 4 * width, HEADS[:-1])):
        for heads in counts:
            accuracies = [
                train_and_evaluate_lookups(heads, TASK, width=width, hidden=hidden, steps=steps, seed=seed)
                for seed in experiment.seeds
            ]
            statistics.add_proportion(f"look-ups right{name}", heads, [accuracy for accuracy, _ in accuracies])
            statistics.add_proportion(
                f"all look-ups right{name}", heads, [all_correct for _, all_correct in accuracies]
            )
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    blended, lookup_text = _judge_lookups(statistics)
    lost = {str(name): statistic for name, statistic in statistics.by_condition("lost by one head").items()}
    worse = [name for name, statistic in lost.items() if statistic.is_interval_above(MIN_DIFFERENCE)]
    better = [name for name, statistic in lost.items() if statistic.is_interval_below(-MIN_DIFFERENCE)]
    unsure = [
        name
        for name, statistic in lost.items()
        if name not in worse and not statistic.is_interval_below(MIN_DIFFERENCE)
    ]
    loss_text = f"one head loses {', '.join(worse) or 'no relation significantly'}"
    if blended and worse and not better:
        return Verdict("holds", loss_text)
    if blended is False and not worse and not unsure:
        return Verdict("does not hold", lookup_text)
    gain_text = f", does better at {', '.join(better)}" if better else ""
    open_text = f"; open: {', '.join(unsure)}" if unsure else ""
    summary = f"{loss_text}{gain_text}{open_text}; {lookup_text}"
    if blended is None or (unsure and not worse):
        return Verdict("undecided", summary)
    return Verdict("depends", f"on the relation: {summary}")


def _judge_lookups(statistics: StatisticTable) -> tuple[bool | None, str]:
    """Return whether lookups support the claim (None: inconclusive), and a description."""
    num_lookups, accuracy_by_heads = len(TASK.offsets), statistics.by_condition("all look-ups right")
    single, multiple = (
        accuracy_by_heads[1],
        [accuracy_by_heads[heads] for heads in _head_counts_covering_lookups(statistics)],
    )
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
        f"whether {num_lookups} look-ups at once go through one and through {num_lookups} heads or more is inconclusive",
    )


def _head_counts_covering_lookups(statistics: StatisticTable) -> list[int]:
    """Return the head counts that are large enough to keep every lookup separate."""
    accuracy_by_heads = statistics.by_condition("all look-ups right")
    return [heads for heads in accuracy_by_heads if isinstance(heads, int) and heads >= len(TASK.offsets)]


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    """Select every relation, because losing any of them counts, and the judged lookups."""
    yield from (("lost by one head", relation) for relation in statistics.by_condition("lost by one head"))
    yield from (("all look-ups right", heads) for heads in (1, *_head_counts_covering_lookups(statistics)))


def training_configs(experiment: TrainedModelProvider) -> Iterable[ExperimentConfig]:
    """Return models with one head and with the default number of heads."""
    return [experiment.make_config(seed, heads) for seed in experiment.seeds for heads in (1, None)]


CLAIM = Claim(
    number=5,
    name="one-head-blends",
    statement="One head must blend relations: it has one attention map, which mixes what several heads keep separate.",
    counterevidence="A one-head model of the same width and parameter count that is as accurate on every relation, or a "
    "single head from whose output several lookups can still be read.",
    setup="Models of the synthetic language with one head and with many, with equal width and parameter count, evaluated on "
    "each relation, and a single layer that must predict the symbols "
    f"{', '.join(map(str, TASK.offsets))} positions back at once with a linear readout, with 1 to 8 heads of one width. The "
    "same layer with an MLP before the readout is reported but not judged: an MLP can separate much of a blend, and so can "
    "the MLPs of the models.",
    rule=f"Lookups support the claim if all of them are correct at significantly more than {MIN_LEARNED:.0%} of positions "
    "with at least as many heads as lookups, and at significantly fewer than "
    f"{MAX_BLENDED:.0%} with one head. They contradict it if one of these is significantly false. Holds if they support it, "
    f"one head loses significantly more than {MIN_DIFFERENCE:.0%} accuracy in some relation, and significantly gains as much "
    "in none. Does not hold if they contradict it and one head loses significantly less than "
    f"{MIN_DIFFERENCE:.0%} in every relation. Otherwise undecided if lookups are inconclusive, or if no relation "
    "is significantly lost and some are inconclusive, else on the relation. Because any relation is enough, the intervals "
    "are corrected for all of them.",
    judged=_judged_statistics,
    primary=PrimaryQuantity("all look-ups right", 1, MAX_BLENDED, "below", planned_seeds=2),
    version=2,
    measure=measure,
    judge=judge,
    plot=PlotSpec(
        ("all look-ups right", "all look-ups right, MLP behind"),
        x="heads",
        y="fraction of positions with all four lookups correct",
        log_x=True,
    ),
    training_configs=training_configs,
)
