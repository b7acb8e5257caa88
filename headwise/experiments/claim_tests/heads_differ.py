"""Heads end up different, and the more so the narrower they are."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from headwise.analysis import compare_heads, default_corpus
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.experiments.head_counts import head_counts, log2_slopes
from headwise.model import ModelProtocol

ROWS = 256  # on which maps are compared
SPACES = ("read_q", "read_k", "read_v", "write")
MIN_DIVERGENCE = 0.05  # nats of Jensen–Shannon divergence; maps that share nothing are ln 2 = .69 apart
MAX_OVERLAP = 0.05  # of the way from chance to the same subspace
MIN_SLOPE = 0.01  # nats, a doubling of the head count


def head_differences(model: ModelProtocol, corpus: Any = None, rows: int = ROWS, seed: int = 0) -> dict[str, float]:
    """How far the heads of a layer are apart, on average over pairs and layers.

    `maps`: Jensen–Shannon divergence of their maps, in nats; `itself`: of one head's, at the same places of another text.
    `spaces`: how far what they read and write overlaps beyond chance, 0 as random subspaces do, 1 the same.
    """
    comparison = compare_heads(model, corpus, rows=rows, seed=seed)
    layers = list(comparison.mean_by_layer().values())
    within_layer = {name: float(np.nanmean([layer[name] for layer in layers])) for name in ("js", *SPACES)}
    chance_overlap = {name: float(comparison.baselines[name]) for name in SPACES}
    above_chance = [
        (within_layer[name] - chance_overlap[name]) / (1 - chance_overlap[name])
        for name in SPACES
        if np.isfinite(within_layer[name])
    ]
    return {
        "maps": within_layer["js"],
        "itself": float(np.mean(comparison.baselines["js"])),
        "spaces": float(np.mean(above_chance)),
    }


def training_configs(experiment: ExperimentContext) -> list[ExperimentConfig]:
    """The usual model, and every head count from two on."""
    counts = dict.fromkeys((experiment.size.heads, *head_counts(experiment.size.width, min_heads=2)))
    return [experiment.make_config(seed, heads) for heads in counts for seed in experiment.seeds]


def measure(experiment: ExperimentContext) -> StatisticTable:
    """The usual model before its first step and after its last; then every head count, after."""
    default_runs = [experiment.train_or_load(experiment.make_config(seed)) for seed in experiment.seeds]
    texts = [experiment.held_out_corpus(seed) for seed in experiment.seeds]
    before = [
        head_differences(results.load_model(0), corpus) for results, corpus in zip(default_runs, texts, strict=True)
    ]
    after = [
        head_differences(results.load_model(), corpus) for results, corpus in zip(default_runs, texts, strict=True)
    ]
    statistics = _before_and_after(before, after)
    by_count: dict[int, list[float]] = {}
    for heads in head_counts(experiment.size.width, min_heads=2):
        models = (
            experiment.train_or_load(experiment.make_config(seed, heads)).load_model() for seed in experiment.seeds
        )
        results = [head_differences(model, corpus) for model, corpus in zip(models, texts, strict=True)]
        by_count[heads] = [entry["maps"] for entry in results]
        statistics.add("maps apart, by heads", heads, by_count[heads])
        statistics.add("spaces alike, by heads", heads, [entry["spaces"] for entry in results])
    return statistics.add("maps apart, gained by a doubling of heads", None, log2_slopes(by_count))


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    yield "maps apart, gained in training", None
    yield "spaces alike beyond chance", "trained"
    yield "maps apart, gained by a doubling of heads", None


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """A model beside one of the same spec that has learned nothing; about head counts nothing can be said."""
    corpus = default_corpus(model) if text is None else text
    return _before_and_after([head_differences(model.untrained(0), corpus)], [head_differences(model, corpus)])


def _before_and_after(before: list[dict[str, float]], after: list[dict[str, float]]) -> StatisticTable:
    statistics = StatisticTable()
    for name, entries in (("untrained", before), ("trained", after)):
        statistics.add("maps apart", name, [entry["maps"] for entry in entries])
        statistics.add("spaces alike beyond chance", name, [entry["spaces"] for entry in entries])
    statistics.add("maps apart", "one head, two texts", [entry["itself"] for entry in after])
    pairs = list(zip(before, after, strict=True))
    return statistics.add("maps apart, gained in training", None, [new["maps"] - old["maps"] for old, new in pairs])


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    gained = statistics["maps apart, gained in training"]
    if not gained.is_interval_above(MIN_DIVERGENCE):
        is_certain = gained.is_interval_below(MIN_DIVERGENCE)
        return (
            Verdict("does not hold")
            if is_certain
            else Verdict("depends", "on the seed: how far maps part varies too much")
        )
    failures, unsure = [], []
    spaces = statistics["spaces alike beyond chance", "trained"]
    if not spaces.is_interval_below(MAX_OVERLAP):
        is_certain = spaces.is_interval_above(MAX_OVERLAP)
        (failures if is_certain else unsure).append(f"their subspaces overlap more than {MAX_OVERLAP:g} beyond chance")
    slopes = statistics.by_condition("maps apart, gained by a doubling of heads").values()
    if any(not slope.is_interval_above(MIN_SLOPE) for slope in slopes):
        is_certain = any(slope.is_interval_below(MIN_SLOPE) for slope in slopes)
        (failures if is_certain else unsure).append(f"narrower heads differ {'no more' if is_certain else 'more'}")
    if failures:
        return Verdict("depends", f"on what is compared: their maps part, but {' and '.join(failures)}")
    if unsure:
        return Verdict("depends", f"on the seed: their maps part, but whether {' and '.join(unsure)} stays open")
    return Verdict("holds", "" if slopes else "head_dim was not compared")


CLAIM = Claim(
    number=8,
    name="heads-differ",
    statement="Heads end up different from each other, and the more so the smaller head_dim is.",
    counterevidence="Maps of a layer's heads as close after training as before, subspaces more alike than random "
    "ones, or a distance that does not grow as heads get narrower.",
    setup="Pairs of heads of one layer, before the first step and after the last: the Jensen–Shannon divergence of "
    f"their maps on {ROWS} rows of held-out text, and how far the subspaces they read and write overlap, as a share of "
    "the way from chance, d/D, to 1. Then the distance of maps for every head count from two on, at one width.",
    rule=f"Does not hold if maps are surely less than {MIN_DIVERGENCE:g} nats further apart after training. Holds if "
    f"surely more, the overlap is surely less than {MAX_OVERLAP:g} beyond chance and the distance surely grows by more "
    f"than {MIN_SLOPE:g} nats for each doubling of the head count (where head counts were compared). Else depends: on "
    "what is compared if maps surely part but one of the others surely is not so, on the seed if that stays open.",
    judged=_judged_statistics,
    measure=measure,
    judge=judge,
    plot=PlotSpec(("maps apart", "maps apart, by heads"), y="Jensen–Shannon divergence, nats"),
    training_configs=training_configs,
    measure_model=measure_model,
)
