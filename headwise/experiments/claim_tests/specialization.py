"""Heads specialize."""

from collections.abc import Iterator
from typing import Any

from headwise.analysis import RELATION_THRESHOLD, Profile, best_relation_heads, profile
from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import ModelProtocol

MIN_ARCS = 20  # smallest number of arcs of a relation on the reporting half
MIN_ROLE_FRACTION = 0.5  # smallest fraction of heads with a role
MIN_GAIN = 0.05  # fraction of heads, above the untrained model


def role_fraction(profiled: Profile) -> float:
    """Return the fraction of heads with a role that is confirmed on held-out texts: evidence level `attention` or better."""
    return sum(head.evidence_level != "none" for head in profiled) / len(profiled)


def relation_gains_and_significance(profiled: Profile, min_arcs: int = MIN_ARCS) -> dict[str, tuple[float, bool]]:
    """Return the gain in accuracy of each relation's best head over the best fixed offset, and whether it is significant.

    Head, direction and offset are selected on one half of the texts and reported on the other.
    """
    rows = best_relation_heads(profiled, min_arcs)
    gains = {row.relation: row.accuracy - row.offset_accuracy for row in rows}
    return {
        row.relation: (gains[row.relation], gains[row.relation] >= RELATION_THRESHOLD and row.p < 0.05) for row in rows
    }


def training_configs(experiment: TrainedModelProvider) -> list[ExperimentConfig]:
    """Return the default model of every seed."""
    return [experiment.make_config(seed) for seed in experiment.seeds]


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Compare the default model after training with its initial state."""
    pairs = []
    for seed in experiment.seeds:
        trained, texts = experiment.train_or_load(experiment.make_config(seed)), experiment.held_out_corpus(seed)
        pairs.append(tuple(profile(trained.load_model(step), texts, causal=False) for step in (0, None)))
    return _before_and_after(pairs)


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    yield "share of heads with a role", "trained"
    yield "share of heads with a role, gained", None
    yield "relations followed, gained", None


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Compare a model with an untrained model of the same spec."""
    return _before_and_after(
        [tuple(profile(model, text, causal=False, control=control) for control in ("random-init", None))]
    )


def _before_and_after(pairs: list[tuple[Profile, ...]]) -> StatisticTable:
    statistics = StatisticTable()
    roles = [[role_fraction(profiled) for profiled in pair] for pair in pairs]
    gains = [[relation_gains_and_significance(profiled) for profiled in pair] for pair in pairs]
    counts = [
        [sum(is_followed for _, is_followed in gains_by_relation.values()) for gains_by_relation in pair]
        for pair in gains
    ]
    for index, name in enumerate(("untrained", "trained")):
        statistics.add_proportion("share of heads with a role", name, [pair[index] for pair in roles])
        statistics.add("relations followed", name, [pair[index] for pair in counts])
        for relation in dict.fromkeys(relation for pair in gains for relation in pair[index]):
            values = [pair[index][relation][0] for pair in gains if relation in pair[index]]
            statistics.add(f"right beyond the best offset, {name}", relation, values)
    statistics.add("share of heads with a role, gained", None, [new - old for old, new in roles])
    return statistics.add("relations followed, gained", None, [new - old for old, new in counts])


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    fraction = statistics["share of heads with a role", "trained"]
    relations = statistics["relations followed, gained"]
    gained = statistics["share of heads with a role, gained"]
    if not gained.is_interval_above(MIN_GAIN) and not relations.is_interval_above(0):
        if gained.is_interval_below(MIN_GAIN) and relations.is_interval_below(1):
            return Verdict("does not hold")
        return Verdict("undecided", "whether heads acquire roles or follow relations is inconclusive")
    if fraction.is_interval_above(MIN_ROLE_FRACTION) and relations.is_interval_above(0):
        return Verdict("holds")
    followed = statistics["relations followed", "trained"].mean
    details = f"{fraction.mean:.0%} have a role, and {followed:.1f} relations are followed"
    is_certain = fraction.is_interval_below(MIN_ROLE_FRACTION) or relations.is_interval_below(1)
    details = f"{details} beyond a fixed offset"
    return Verdict("depends", f"on the head: {details}") if is_certain else Verdict("undecided", details)


CLAIM = Claim(
    number=9,
    name="specialization",
    statement="Heads specialize: each acquires a function of its own, such as following one grammatical relation.",
    counterevidence="Heads that do nothing after training that those of an untrained model do not do, or that attend "
    "where a fixed offset would.",
    setup="The profile of every head on held-out text, before and after training. Counted are heads whose role has evidence "
    "level `attention` or better: above its baseline on texts that it was not selected on, over all tested heads and roles. "
    f"For each relation with at least {MIN_ARCS} arcs the best head is compared with the best fixed offset, both selected "
    f"on one half of the texts and reported on the other. Followed means {RELATION_THRESHOLD:g} more accurate, with "
    "p < 0.05 over the relations.",
    rule=f"Does not hold if the fraction of heads with a role grew by significantly less than {MIN_GAIN:g} in training and "
    "the number of followed relations by significantly less than one. Undecided if neither this is significant "
    f"nor a growth of the fraction by more than {MIN_GAIN:g} or of the number by more than zero. Otherwise holds if "
    f"significantly more than {MIN_ROLE_FRACTION:.0%} of heads have a role and the number of followed relations grew "
    "significantly. Otherwise depends: on the head if one of these is significantly false, else undecided.",
    judged=_judged_statistics,
    primary=PrimaryQuantity("share of heads with a role", "trained", MIN_ROLE_FRACTION, "above", planned_seeds=6),
    version=2,
    measure=measure,
    judge=judge,
    plot=PlotSpec(("right beyond the best offset, trained", "right beyond the best offset, untrained"), y="accuracy"),
    training_configs=training_configs,
    measure_model=measure_model,
)
