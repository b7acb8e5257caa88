"""Heads become different, and more so the narrower they are."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from headwise.analysis import compare_heads, default_corpus
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.compared_head_counts import fit_log2_slopes, head_counts
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import ModelProtocol

ROWS = 256  # text rows on which maps are compared
SPACES = ("read_q", "read_k", "read_v", "write")
MIN_DIVERGENCE = 0.05  # nats of Jensen–Shannon divergence; the maximum is ln 2 = 0.69
MAX_OVERLAP = 0.05  # 0: overlap of random subspaces, 1: identical subspaces
MIN_SLOPE = 0.01  # nats per doubling of the head count


def head_differences(model: ModelProtocol, corpus: Any = None, rows: int = ROWS, seed: int = 0) -> dict[str, float]:
    """Return the differences between the heads of a layer, averaged over pairs and layers.

    `maps`: Jensen–Shannon divergence of the maps, in nats. `itself`: of one head's maps, at the same positions of another
    text. `spaces`: overlap of the input and write subspaces beyond chance, 0 for random subspaces, 1 for identical ones.
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


def training_configs(experiment: TrainedModelProvider) -> list[ExperimentConfig]:
    """Return the default model, and every head count from two upward."""
    counts = dict.fromkeys((experiment.size.heads, *head_counts(experiment.size.width, min_heads=2)))
    return [experiment.make_config(seed, heads) for heads in counts for seed in experiment.seeds]


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure the default model before and after training, and every head count after training."""
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
    return statistics.add("maps apart, gained by a doubling of heads", None, fit_log2_slopes(by_count))


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    yield "maps apart, gained in training", None
    yield "spaces alike beyond chance", "trained"
    yield "maps apart, gained by a doubling of heads", None


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Compare a model with an untrained model of the same spec. Head counts are not compared."""
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
    """Apply the rule of CLAIM."""
    gained = statistics["maps apart, gained in training"]
    if not gained.is_interval_above(MIN_DIVERGENCE):
        is_certain = gained.is_interval_below(MIN_DIVERGENCE)
        return Verdict("does not hold") if is_certain else Verdict("undecided", "the distance of maps varies too much")
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
        return Verdict("depends", f"on the comparison: their maps diverge, but {' and '.join(failures)}")
    if unsure:
        return Verdict("undecided", f"their maps diverge, but whether {' and '.join(unsure)} is inconclusive")
    return Verdict("holds", "" if slopes else "head_dim was not compared")


CLAIM = Claim(
    number=8,
    name="heads-differ",
    statement="Heads end up different from each other, and the more so the smaller head_dim is.",
    counterevidence="Maps of a layer's heads that are as close after training as before, subspaces more similar than "
    "random ones, or a distance that does not grow as heads get narrower.",
    setup="Pairs of heads of one layer, before and after training: the Jensen–Shannon divergence of their maps on "
    f"{ROWS} rows of held-out text, and the overlap of the subspaces that they read and write, as a fraction of the way "
    "from chance, d/D, to 1. Then the distance of maps for every head count from two upward, at one width.",
    rule=f"Does not hold if the distance of maps grows by significantly less than {MIN_DIVERGENCE:g} nats in training. "
    f"Holds if it grows by significantly more, the overlap is significantly less than {MAX_OVERLAP:g} beyond chance and the "
    f"distance grows by significantly more than {MIN_SLOPE:g} nats per doubling of the head count (if head counts were "
    "compared). Otherwise depends: on the comparison if maps diverge but one of the others is significantly false, "
    "else undecided.",
    judged=_judged_statistics,
    measure=measure,
    judge=judge,
    plot=PlotSpec(("maps apart", "maps apart, by heads"), x="heads", y="Jensen–Shannon divergence, nats", log_x=True),
    training_configs=training_configs,
    measure_model=measure_model,
)
