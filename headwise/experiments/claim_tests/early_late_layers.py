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
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, PlotSpec, Verdict, format_labeled_lists, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.equal_parameter_specs import LAYERS, make_deep_experiment
from headwise.experiments.experiment_context import ExperimentContext
from headwise.experiments.pretrained_claim_model import PRETRAINED, installed_pretrained_name, load_pretrained
from headwise.model import ModelProtocol
from headwise.text import Corpus, Document

THIRDS = ("first third", "middle third", "last third")
SYNTAX = (
    "determiner-noun", "adjective-noun", "subject-verb", "verb-object", "possessive",
    "det", "amod", "nsubj", "obj", "nmod:poss",
)  # fmt: skip
SEMANTICS = ("semantic", "coreference")  # as roles are told
EARLY, LATE = ("local", "syntactic"), ("long range", "semantic")
LONG_RANGE = 32  # tokens: from this distance on, weight counts as long range
MIN_GAP = 0.05  # of the weight, or in accuracy
TEXTS, SENTENCES = 8, 15  # where documents are short, so many texts are made of so many of them each


@dataclass(frozen=True, eq=False)
class DepthTrend:
    """One measure in the first, the middle and the last third of the layers: sums and counts by bucket of texts."""

    sums: np.ndarray  # (buckets, 3)
    counts: np.ndarray  # (buckets, 3)

    @property
    def means_by_third(self) -> list[float]:
        """The three numbers."""
        return (self.sums.sum(0) / self.counts.sum(0)).tolist()

    def gap(self, first: int, second: int) -> Statistic:
        """How much more there is in one third than in another; the interval is over texts, of one text there is none."""
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


def trends_by_depth(model: ModelProtocol, text: Any = None) -> dict[str, DepthTrend]:
    """What heads do in each third of the layers, over a text (None: the model's usual one).

    `local` and `long range` are the weight 1 to 3 tokens away and 32 or more, as shares of what does not rest on the first
    token; `syntactic` and `semantic` how often the best head of the third follows a relation, above the best fixed offset:
    the head is chosen on half of the documents and judged by the other. What a text has no relations for is left out.
    """
    if model.spec.layers < 3:
        raise HeadwiseError(f"thirds need at least three layers; this model has {model.spec.layers}.")
    corpus, relations = _default_texts(model) if text is None else (text, None)
    return _depth_trends(profile(model, corpus, relations=relations, causal=False))


def training_configs(experiment: ExperimentContext) -> Iterator[ExperimentConfig]:
    """The deeper model of every seed."""
    return (make_deep_experiment(experiment).make_config(seed) for seed in experiment.seeds)


def measure(experiment: ExperimentContext) -> StatisticTable:
    """Trained models of six layers, and SmolLM2's thirty if it is installed."""
    statistics = StatisticTable()
    _add_trends(
        statistics,
        "trained",
        [
            trends_by_depth(experiment.train_or_load(config).load_model(), experiment.held_out_corpus())
            for config in training_configs(experiment)
        ],
    )
    pretrained = load_pretrained()
    if pretrained is not None:
        _add_trends(statistics, PRETRAINED, [trends_by_depth(pretrained)])
    return statistics


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """The same with a model and its text."""
    statistics = StatisticTable()
    _add_trends(statistics, "given", [trends_by_depth(model, text)])
    return statistics


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    gaps = {str(condition): gap for condition, gap in statistics.by_condition(GAP).items()}
    confirmed = [condition for condition, gap in gaps.items() if gap.is_interval_above(MIN_GAP)]
    refuted = [condition for condition, gap in gaps.items() if gap.is_interval_below(MIN_GAP)]
    unsure = [condition for condition in gaps if condition not in (*confirmed, *refuted)]
    details = format_labeled_lists({"shown": confirmed, "not so": refuted, "open": unsure})
    if len(confirmed) == len(gaps):
        return Verdict("holds")
    if 2 * len(refuted) > len(gaps):
        return Verdict("does not hold", format_labeled_lists({"shown": confirmed, "open": unsure}))
    return Verdict("depends", f"on {'what is meant, and where' if refuted else 'the seed, or the text'}; {details}")


GAP = "the way the claim has it"  # early − late for what is said to be early, late − early for the rest


def _default_texts(model: ModelProtocol) -> tuple[Any, Any]:
    """The model's usual documents; short ones are laid end to end as well, so that something is far away."""
    documents = [item for item in default_corpus(model).items() if isinstance(item, Document)]
    if np.median([len(document.words) for document in documents]) > 2 * LONG_RANGE:
        return Corpus.of(documents), None
    stride = max(1, len(documents) // SENTENCES)  # sentences of a text are of all kinds
    texts = [" ".join(document.text for document in documents[start::stride]) for start in range(min(TEXTS, stride))]
    return texts, documents


def _depth_trends(profiled: Profile) -> dict[str, DepthTrend]:
    layers = {name: third_of_head for third_of_head, name in enumerate(profiled.metadata["layers"])}
    third_of_head = np.array([3 * layers[str(address.layer_address)] // len(layers) for address in profiled.addresses])
    if len({*third_of_head.tolist()}) < 3:
        raise HeadwiseError("a third of the layers of this model has no heads left; give the whole model.")
    third = np.eye(3)[third_of_head]  # (heads, 3)
    first, rows = profiled.accumulator.bucket_sums_and_counts("first")  # (buckets, heads)
    non_sink = (rows - first) @ third  # (buckets, 3)
    near_weight = profiled.accumulator.bucket_sums_and_counts("local")[0]
    far_weight, far_rows = profiled.accumulator.bucket_sums_and_counts("long range")
    if not far_rows.sum():
        raise HeadwiseError(
            f"no token of this text has another {LONG_RANGE} or more before it, the first left out; give longer texts."
        )
    distance_sums = profiled.accumulator.bucket_sums_and_counts("signed distance")[0]
    trends = {
        "local": DepthTrend(near_weight @ third, non_sink),
        "long range": DepthTrend(far_weight @ third, non_sink),
        "syntactic": _accuracy(profiled, SYNTAX, third_of_head),
        "semantic": _accuracy(profiled, SEMANTICS, third_of_head),
        "mean distance back, the first token included": DepthTrend(distance_sums @ third, rows @ third),
        "weight on the first token": DepthTrend(first @ third, rows @ third),
    }
    return {name: value for name, value in trends.items() if value is not None}


def _accuracy(profiled: Profile, names: Sequence[str], third_of_head: np.ndarray) -> DepthTrend | None:
    """How often the best head of each third follows a relation, above the best fixed offset: the mean of relations."""
    best: dict[tuple[str, int], tuple[float, np.ndarray]] = {}  # (relation, third): on one half, and sums on the other
    for scores in score(profiled.accumulator, profiled.relation_metric):
        if scores.role.name not in names or min(scores.buckets_in_half(half).sum() for half in (0, 1)) < MIN_UNITS:
            continue
        selection_gain = scores.mean(SELECTION) - scores.baseline(SELECTION)  # (heads,)
        reporting = scores.buckets_in_half(REPORTING)[:, None]  # (buckets, 1)
        gains, arcs = (scores.scores - scores.baselines) * reporting, scores.counts * reporting  # (buckets, heads)
        for third in range(3):
            head = max(np.flatnonzero(third_of_head == third), key=lambda candidate: selection_gain[candidate])
            # each relation counts alike, however many arcs it has
            sums = np.stack((gains[:, head], arcs[:, head])) / arcs[:, head].sum()  # (2, buckets)
            key = scores.role.name, third
            if key not in best or selection_gain[head] > best[key][0]:  # the better of both directions
                best[key] = float(selection_gain[head]), sums
    if not best:
        return None
    reporting = [
        np.sum([sums for (_, third), (_, sums) in best.items() if third == candidate], 0) for candidate in range(3)
    ]
    return DepthTrend(*np.stack(reporting, -1))  # (2, buckets, 3)


def _add_trends(statistics: StatisticTable, model_label: str, trends: Sequence[Mapping[str, DepthTrend]]) -> None:
    """Of several seeds the interval is over them; of a single model over texts."""
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
    counterevidence="A model whose last third of layers is as local or as syntactic as its first, or whose first is "
    "as long-range or as semantic as its last.",
    setup=f"Trained models of {LAYERS} layers on held-out documents, and SmolLM2's 30 layers on the probe set where it "
    f"is installed, by thirds: the weight 1 to 3 tokens away and {LONG_RANGE} or more away, of what does not rest on the "
    "first token; and how often the best head follows syntactic relations, or related words and pronouns, above the "
    "best fixed offset.",
    rule="Four things are said of each model: local early, syntactic early, long range late, semantic late. Each is "
    f"shown where the first and the last third surely differ that way by more than {MIN_GAP:g} (share of weight, or "
    "accuracy), not so where surely by less or the other way, and open else. Holds if all are shown, does not hold if "
    "more than half are not so. Else depends: on which if any is not so, on the seed or the text if some are open and "
    "none is not so.",
    judged=statistic_key_selector(GAP),
    measure=measure,
    judge=judge,
    plot=PlotSpec((*EARLY, *LATE), y="share of weight, or accuracy above the best offset"),
    training_configs=training_configs,
    measure_model=measure_model,
    extra_key=installed_pretrained_name,
)
