"""Early layers are local and syntactic, later layers long-range and semantic."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwise.analysis import (
    MIN_UNITS,
    REPORTING,
    SELECTION,
    Profile,
    bootstrap_difference_interval,
    default_corpus,
    profile,
    score,
)
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.experiments.claim import Claim, PlotSpec, Verdict, format_labeled_lists, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.layers_or_heads_specs import LAYERS, make_deep_experiment
from headwise.experiments.pretrained_claim_model import (
    PRETRAINED,
    installed_pretrained_name,
    load_pretrained_if_installed,
)
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import ModelProtocol
from headwise.text import Corpus, Document

THIRDS = ("first third", "middle third", "last third")
SYNTAX = (
    "determiner-noun", "adjective-noun", "subject-verb", "verb-object", "possessive",
    "det", "amod", "nsubj", "obj", "nmod:poss",
)  # fmt: skip
SEMANTICS = ("semantic", "coreference")  # names of the roles
EARLY, LATE = ("local", "syntactic"), ("long range", "semantic")
LONG_RANGE = 32  # distance in tokens from which attention counts as long-range
MIN_GAP = 0.05  # fraction of the attention weight, or accuracy
TEXTS, SENTENCES = 8, 15  # if documents are short: number of texts, and documents joined into each


@dataclass(frozen=True, eq=False)
class LayerThirdMeans:
    """Sums and counts of one metric in the first, middle and last third of the layers, by bucket of texts."""

    sums: np.ndarray  # (buckets, 3)
    counts: np.ndarray  # (buckets, 3)

    @property
    def means_by_third(self) -> list[float]:
        """Means of the three thirds."""
        return (self.sums.sum(0) / self.counts.sum(0)).tolist()

    def gap(self, first: int, second: int) -> Statistic:
        """Return the difference between two thirds. The interval is over texts. A single text has no interval."""
        parts = (table[:, part] for part in (first, second) for table in (self.sums, self.counts))
        (low, high), difference = (
            bootstrap_difference_interval(*parts),
            self.means_by_third[first] - self.means_by_third[second],
        )
        return (
            Statistic.with_interval(difference, float(low), float(high))
            if np.isfinite(low)
            else Statistic.mean_of(difference)
        )


def metrics_by_layer_third(model: ModelProtocol, text: Any = None) -> dict[str, LayerThirdMeans]:
    """Measure the behavior of heads in each third of the layers on a text (None: the model's default corpus).

    `local` and `long range` are the attention 1 to 3 tokens back and 32 or more tokens back, as fractions of the attention
    that is not on the first token. `syntactic` and `semantic` are the accuracies with which the best head of the third
    follows a relation, above the best fixed offset. The head is selected on one half of the documents and evaluated on the
    other. Metrics whose relations do not occur in the text are omitted.
    """
    if model.spec.layers < 3:
        raise UnsupportedModelError(
            f"model: the comparison of thirds needs at least three layers. Got {model.spec.layers}. Use a deeper model."
        )
    corpus, relations = _default_texts(model) if text is None else (text, None)
    return _layer_third_means(profile(model, corpus, relations=relations, causal=False))


def training_configs(experiment: TrainedModelProvider) -> Iterator[ExperimentConfig]:
    """Return the deeper model of every seed."""
    return (make_deep_experiment(experiment).make_config(seed) for seed in experiment.seeds)


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure trained six-layer models, and SmolLM2 (30 layers) if it is installed."""
    statistics = StatisticTable()
    _add_trends(
        statistics,
        "trained",
        [
            metrics_by_layer_third(experiment.train_or_load(config).load_model(), experiment.held_out_corpus())
            for config in training_configs(experiment)
        ],
    )
    pretrained = load_pretrained_if_installed()
    if pretrained is not None:
        _add_trends(statistics, PRETRAINED, [metrics_by_layer_third(pretrained)])
    return statistics


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Measure the given model on a text."""
    statistics = StatisticTable()
    _add_trends(statistics, "given", [metrics_by_layer_third(model, text)])
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    gaps = {str(condition): gap for condition, gap in statistics.by_condition(GAP).items()}
    confirmed = [condition for condition, gap in gaps.items() if gap.is_interval_above(MIN_GAP)]
    refuted = [condition for condition, gap in gaps.items() if gap.is_interval_below(MIN_GAP)]
    unsure = [condition for condition in gaps if condition not in (*confirmed, *refuted)]
    details = format_labeled_lists({"shown": confirmed, "not so": refuted, "open": unsure})
    if len(confirmed) == len(gaps):
        return Verdict("holds")
    if 2 * len(refuted) > len(gaps):
        return Verdict("does not hold", format_labeled_lists({"shown": confirmed, "open": unsure}))
    return Verdict("depends", f"on the property and the model; {details}") if refuted else Verdict("undecided", details)


GAP = "the way the claim has it"  # early − late for properties of early layers, late − early for properties of late layers


def _default_texts(model: ModelProtocol) -> tuple[Any, Any]:
    """Return the model's default documents. Short documents are also joined, so that long distances occur."""
    documents = [item for item in default_corpus(model).items() if isinstance(item, Document)]
    if np.median([len(document.words) for document in documents]) > 2 * LONG_RANGE:
        return Corpus.of(documents), None
    stride = max(1, len(documents) // SENTENCES)  # so that each text contains sentences of all kinds
    texts = [" ".join(document.text for document in documents[start::stride]) for start in range(min(TEXTS, stride))]
    return texts, documents


def _layer_third_means(profiled: Profile) -> dict[str, LayerThirdMeans]:
    layers = {name: third_of_head for third_of_head, name in enumerate(profiled.metadata["layers"])}
    third_of_head = np.array([3 * layers[str(address.layer_address)] // len(layers) for address in profiled.addresses])
    if len({*third_of_head.tolist()}) < 3:
        raise UnsupportedModelError(
            "model: early, middle and late thirds of the layers are compared, and one third has no heads left after pruning. "
            "Use the model before pruning."
        )
    third = np.eye(3)[third_of_head]  # (heads, 3)
    first, rows = profiled.accumulator.bucket_sums_and_counts("first")  # (buckets, heads)
    non_sink = (rows - first) @ third  # (buckets, 3)
    near_weight = profiled.accumulator.bucket_sums_and_counts("local")[0]
    far_weight, far_rows = profiled.accumulator.bucket_sums_and_counts("long range")
    if not far_rows.sum():
        raise ArgumentError(
            f"text: too short to measure long-range attention, {LONG_RANGE} or more tokens back without the first token. "
            "Use longer texts."
        )
    distance_sums = profiled.accumulator.bucket_sums_and_counts("signed distance")[0]
    trends = {
        "local": LayerThirdMeans(near_weight @ third, non_sink),
        "long range": LayerThirdMeans(far_weight @ third, non_sink),
        "syntactic": _relation_accuracy_by_third(profiled, SYNTAX, third_of_head),
        "semantic": _relation_accuracy_by_third(profiled, SEMANTICS, third_of_head),
        "mean distance back, the first token included": LayerThirdMeans(distance_sums @ third, rows @ third),
        "weight on the first token": LayerThirdMeans(first @ third, rows @ third),
    }
    return {name: value for name, value in trends.items() if value is not None}


def _relation_accuracy_by_third(
    profiled: Profile, names: Sequence[str], third_of_head: np.ndarray
) -> LayerThirdMeans | None:
    """Return the mean over relations of the best head's accuracy in each third, above the best fixed offset."""
    best: dict[
        tuple[str, int], tuple[float, np.ndarray]
    ] = {}  # (relation, third): gain on the selection half, and sums on the reporting half
    for scores in score(profiled.accumulator, profiled.relation_metric):
        if scores.role.name not in names or min(scores.buckets_in_half(half).sum() for half in (0, 1)) < MIN_UNITS:
            continue
        selection_gain = scores.mean(SELECTION) - scores.baseline(SELECTION)  # (heads,)
        reporting = scores.buckets_in_half(REPORTING)[:, None]  # (buckets, 1)
        gains, arcs = (scores.scores - scores.baselines) * reporting, scores.counts * reporting  # (buckets, heads)
        for third in range(3):
            head = max(np.flatnonzero(third_of_head == third), key=lambda candidate: selection_gain[candidate])
            # each relation has equal weight, regardless of its number of arcs
            sums = np.stack((gains[:, head], arcs[:, head])) / arcs[:, head].sum()  # (2, buckets)
            key = scores.role.name, third
            if key not in best or selection_gain[head] > best[key][0]:  # the better of both directions
                best[key] = float(selection_gain[head]), sums
    if not best:
        return None
    reporting = [
        np.sum([sums for (_, third), (_, sums) in best.items() if third == candidate], 0) for candidate in range(3)
    ]
    return LayerThirdMeans(*np.stack(reporting, -1))  # (2, buckets, 3)


def _add_trends(statistics: StatisticTable, model_label: str, trends: Sequence[Mapping[str, LayerThirdMeans]]) -> None:
    """Add the trends. The interval is over seeds, or over texts for a single model."""
    for name in trends[0]:
        for index, third in enumerate(THIRDS):
            statistics.add(name, f"{model_label}: {third}", [trend[name].means_by_third[index] for trend in trends])
    for name in (*EARLY, *LATE):
        if name in trends[0]:
            phase, ends = ("early", (0, 2)) if name in EARLY else ("late", (2, 0))
            gaps = [trend[name].gap(*ends) for trend in trends]
            statistics.add(
                GAP, f"{name} {phase} ({model_label})", gaps[0] if len(gaps) == 1 else [gap.mean for gap in gaps]
            )


CLAIM = Claim(
    number=19,
    name="early-late",
    statement="Early layers are local and syntactic, later layers long-range and semantic.",
    counterevidence="A model whose last third of layers is as local or as syntactic as its first, or whose first third is "
    "as long-range or as semantic as its last.",
    setup=f"Trained models of {LAYERS} layers on held-out documents, and SmolLM2 (30 layers) on the probe set if it is "
    f"installed, by thirds of the layers: the attention 1 to 3 tokens away and {LONG_RANGE} or more away, as fractions of "
    "the attention that is not on the first token, and how often the best head follows syntactic relations, or related "
    "words and pronouns, above the best fixed offset.",
    rule="Four properties are tested for each model: local early, syntactic early, long range late, semantic late. A "
    f"property is shown if the first and the last third differ in that direction by significantly more than {MIN_GAP:g} "
    "(fraction of attention, or accuracy), not so if by significantly less or in the other direction, else open. Holds if "
    "all are shown, does not hold if more than half are not so. Otherwise depends: on the property and the model if any is "
    "not so, else undecided.",
    judged=statistic_key_selector(GAP),
    measure=measure,
    judge=judge,
    plot=PlotSpec((*EARLY, *LATE), y="fraction of attention, or accuracy above the best offset"),
    training_configs=training_configs,
    measure_model=measure_model,
    extra_key=installed_pretrained_name,
)
