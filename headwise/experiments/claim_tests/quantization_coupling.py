"""Quantization affects heads asymmetrically, and couples them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from headwise.analysis import default_corpus, eval_corpus, joint_quantization_costs, sensitivity
from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.experiments.claim import (
    Claim,
    PlotSpec,
    PrimaryQuantity,
    Verdict,
    format_labeled_lists,
    statistic_key_selector,
)
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import ModelProtocol

BITS = 3  # low enough for a measurable cost
HEADS = 24  # for a large model: KV heads are sampled up to this many query heads
DOCUMENTS = 64  # documents for the small models
TEXTS, SENTENCES = 16, 4  # default texts: number of texts, and sentences per text
DRAWS = 2000  # bootstrap draws over texts, for the intervals of a single model
MIN_SPREAD, MIN_COUPLING = 0.5, 0.1  # relative to the mean of heads; relative to the single costs of two heads
FACTOR = 1.5  # ratio between keys and values
SPREAD, COUPLING, KEY_VALUE = "spread over heads", "coupling of pairs", "cached keys against values, doublings"
THRESHOLDS = {SPREAD: MIN_SPREAD, COUPLING: MIN_COUPLING, KEY_VALUE: float(np.log2(FACTOR))}
Halves = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class QuantizationCosts:
    """Cost of quantization for some KV heads of a model, per text. Every second text belongs to the other half.

    Attributes:
        drifts: (heads, texts) KL drift with the weights of one head quantized.
        singles: (heads, texts) loss with the weights of one head quantized.
        pairs: (pairs, texts) loss with the weights of two heads quantized.
        pair_heads: (pairs, 2) heads of each pair.
        all_heads: (texts,) loss with all of these heads quantized.
        key_drifts: (heads, texts) drift with quantized cached keys.
        value_drifts: (heads, texts) drift with quantized cached values.
        counts: (texts,) number of tokens.
    """

    drifts: np.ndarray
    singles: np.ndarray
    pairs: np.ndarray
    pair_heads: np.ndarray
    all_heads: np.ndarray
    key_drifts: np.ndarray
    value_drifts: np.ndarray
    counts: np.ndarray

    def bootstrap_statistic(self, compute: "CostStatistic", seed: int = 0) -> Statistic:
        """Return a statistic of one model with its bootstrap interval over texts, resampled within each half."""
        rng, n = np.random.default_rng(seed), len(self.counts)
        resampled = []
        for _ in range(DRAWS):
            text_weights = np.zeros(n)
            for half in (0, 1):
                half_indices = np.arange(half, n, 2)
                text_weights += np.bincount(rng.choice(half_indices, len(half_indices)), minlength=n)
            resampled.append(compute(self, text_weights))
        is_finite = bool(np.isfinite(resampled).all())  # if some draws are undefined, the interval is too
        low, high = np.percentile(resampled, (2.5, 97.5)) if is_finite else (-np.inf, np.inf)
        return Statistic.with_interval(compute(self, np.ones(n)), float(low), float(high))

    def half_means(self, sums: np.ndarray, text_weights: np.ndarray) -> Halves:
        """Return means per token over each half of the texts, with a weight per text: (items,) twice."""
        first, second = (
            (sums[:, half] @ text_weights[half]) / (self.counts[half] @ text_weights[half])
            for half in _even_odd_slices(len(text_weights))
        )
        return first, second


CostStatistic = Callable[[QuantizationCosts, np.ndarray], float]


def _even_odd_slices(n: int) -> tuple[slice, slice]:
    return slice(0, n, 2), slice(1, n, 2)


def cost_variation_between_heads(costs: QuantizationCosts, text_weights: np.ndarray) -> float:
    """Return the standard deviation of drifts between heads over their mean, without the variation between texts.

    The variance is the covariance between the two halves of the texts, so that variation due to texts cancels.
    """
    first, second = costs.half_means(costs.drifts, text_weights)
    covariance = ((first - first.mean()) * (second - second.mean())).sum() / (len(first) - 1)
    mean = (first.mean() + second.mean()) / 2
    return float(np.sqrt(max(0.0, covariance)) / mean) if mean > 0 else 0.0


def head_pair_interaction(costs: QuantizationCosts, text_weights: np.ndarray) -> float:
    """Return the interaction of head pairs relative to their single costs.

    Root mean square over pairs of loss(a, b) − loss(a) − loss(b) + loss, over that of loss(a) + loss(b) − 2 loss. Squares
    are products of both halves of the texts, so that noise cancels.
    """
    first, second = (costs.singles[costs.pair_heads[:, side]] for side in (0, 1))  # (pairs, texts)
    single_costs = first + second
    deviation, size = (
        float(np.mean(np.multiply(*costs.half_means(sums, text_weights))))
        for sums in (costs.pairs - single_costs, single_costs)
    )
    return float(np.sqrt(max(0.0, deviation) / size)) if size > 0 else float("nan")


def key_to_value_drift_log2_ratio(costs: QuantizationCosts, text_weights: np.ndarray) -> float:
    """Return log₂ of the drift by cached keys over the drift by cached values. Below 0 values drift further."""
    keys, values = (float((sums @ text_weights).sum()) for sums in (costs.key_drifts, costs.value_drifts))
    return float(np.log2(keys / values)) if keys > 0 and values > 0 else 0.0


def additivity(costs: QuantizationCosts, text_weights: np.ndarray) -> float:
    """Return the cost of all heads at once, relative to the sum of their single costs."""
    single_cost = float((costs.singles @ text_weights).sum())
    return float(costs.all_heads @ text_weights) / single_cost if single_cost > 0 else float("nan")


COST_STATISTICS: dict[str, CostStatistic] = {
    SPREAD: cost_variation_between_heads,
    COUPLING: head_pair_interaction,
    KEY_VALUE: key_to_value_drift_log2_ratio,
    "all at once, of the sum": additivity,
}


def single_and_pair_quantization_costs(
    model: ModelProtocol, texts: Any, bits: int = BITS, heads: int = HEADS, seed: int = 0
) -> QuantizationCosts:
    """Measure the cost of quantizing KV heads alone and in pairs. For a large model, heads are sampled."""
    kv_heads = sample_kv_heads(model, heads, seed)
    pairs = list(combinations(range(len(kv_heads)), 2))
    if not pairs:
        raise UnsupportedModelError(
            "model: pairs need at least two KV heads, and this model has fewer. Use a larger model."
        )
    sets = [*((kv_head,) for kv_head in kv_heads), *((kv_heads[a], kv_heads[b]) for a, b in pairs), tuple(kv_heads)]
    coupled = joint_quantization_costs(model, texts, sets, bits)
    if len(coupled.counts) < 4:
        raise ArgumentError(
            "texts: at least four texts are needed, because confidence intervals are computed on each half of the texts and "
            f"need two or more. Got {len(coupled.counts)}. Use more texts."
        )
    head_addresses = [head for kv_head in kv_heads for head in query_heads_by_kv(model)[kv_head]]
    cached = sensitivity(model, texts, bits=(bits,), parts=("keys", "values"), heads=",".join(head_addresses))
    drifts = {(setting.kv_head, setting.part): cached.kl_sums[index] for index, setting in enumerate(cached.targets)}
    n = len(kv_heads)
    return QuantizationCosts(
        coupled.kl_sums[:n], coupled.loss_sums[:n], coupled.loss_sums[n:-1], np.array(pairs), coupled.loss_sums[-1],
        np.stack([drifts[kv_head, "keys"] for kv_head in kv_heads]),
        np.stack([drifts[kv_head, "values"] for kv_head in kv_heads]), coupled.counts,
    )  # fmt: skip


def query_heads_by_kv(model: ModelProtocol) -> dict[str, tuple[str, ...]]:
    """Return the query heads of each KV head."""
    heads_by_kv_head = {}
    for layer in model.attention_layers():
        address = layer.hook_point.address
        for kv_id, heads in zip(layer.spec.kv_head_ids, layer.spec.heads_of_kv, strict=True):
            heads_by_kv_head[str(address.head_address(kv_id))] = tuple(str(address.head_address(n)) for n in heads)
    return heads_by_kv_head


def sample_kv_heads(model: ModelProtocol, max_query_heads: int = HEADS, seed: int = 0) -> list[str]:
    """Return all KV heads, or a random sample that serves at most `max_query_heads` query heads, in order."""
    heads_by_kv_head = query_heads_by_kv(model)
    names, selected, num_heads = list(heads_by_kv_head), set[str](), 0
    for index in np.random.default_rng(seed).permutation(len(names)):
        num_heads += len(heads_by_kv_head[names[index]])
        if num_heads > max_query_heads:
            break
        selected.add(names[index])
    return [name for name in names if name in selected]


def training_configs(experiment: TrainedModelProvider) -> Iterator[ExperimentConfig]:
    """Return the default model of every seed."""
    return (experiment.make_config(seed) for seed in experiment.seeds)


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure the model of every seed on held-out documents of that seed."""
    statistics, costs = StatisticTable(), list[QuantizationCosts]()
    for config in training_configs(experiment):
        model = experiment.train_or_load(config).load_model()
        costs.append(
            single_and_pair_quantization_costs(
                model, eval_corpus(model, experiment.held_out_corpus(config.recipe.seed)).first(DOCUMENTS)
            )
        )
    for name, compute in COST_STATISTICS.items():
        values = [compute(entry, np.ones(len(entry.counts))) for entry in costs]
        statistics.add(name, SYNTHETIC_MODELS, values if len(values) > 1 else costs[0].bootstrap_statistic(compute))
    statistics.add("drift, nats a token", SYNTHETIC_MODELS, [_mean_drift(entry) for entry in costs])
    return statistics


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Measure the given model on a text."""
    statistics = StatisticTable()
    _add_costs(
        statistics,
        "given",
        single_and_pair_quantization_costs(
            model, _default_texts(model) if text is None else eval_corpus(model, text).first(TEXTS)
        ),
    )
    return statistics


def _add_costs(statistics: StatisticTable, model_label: str, costs: QuantizationCosts) -> None:
    for name, compute in COST_STATISTICS.items():
        statistics.add(name, model_label, costs.bootstrap_statistic(compute))
    statistics.add("drift, nats a token", model_label, _mean_drift(costs))


def _mean_drift(costs: QuantizationCosts) -> float:
    """Return the mean drift over heads."""
    return float(costs.drifts.sum() / costs.counts.sum() / len(costs.drifts))


def _default_texts(model: ModelProtocol) -> list[str]:
    """Join default sentences of the model into texts with sentences of all kinds."""
    documents = [item.text for item in default_corpus(model).items()]
    stride = max(1, len(documents) // SENTENCES)
    return [" ".join(documents[start::stride][:SENTENCES]) for start in range(min(TEXTS, stride))]


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    confirmed, refuted, unsure = [], [], []
    for name, threshold in THRESHOLDS.items():
        for model_label, statistic in statistics.by_condition(name).items():
            beyond = statistic.is_interval_above(threshold) or (
                name == KEY_VALUE and statistic.is_interval_below(-threshold)
            )
            within = statistic.is_interval_below(threshold) and (
                name != KEY_VALUE or statistic.is_interval_above(-threshold)
            )
            details = f"{FINDINGS[name]} ({model_label})"
            (confirmed if beyond else refuted if within else unsure).append(details)
    if not (refuted or unsure):
        return Verdict("holds")
    if len(refuted) > len(confirmed) + len(unsure):
        return Verdict("does not hold", format_labeled_lists({"shown": confirmed, "open": unsure}))
    details = format_labeled_lists({"shown": confirmed, "not so": refuted, "open": unsure})
    return Verdict("depends", f"on the property and the model; {details}") if refuted else Verdict("undecided", details)


SYNTHETIC_MODELS = "little models"
FINDINGS = {SPREAD: "heads uneven", COUPLING: "pairs coupled", KEY_VALUE: "keys unlike values"}
CLAIM = Claim(
    number=26,
    name="quantization",
    statement="Quantization affects heads asymmetrically, and couples them.",
    counterevidence="Heads whose quantization costs are about equal and add up, and whose cached keys and values cost the "
    "same.",
    setup=f"Weights of one head, and of every pair, quantized to {BITS} bits in groups of 32 in a balanced basis: all heads "
    f"of default models on {DOCUMENTS} held-out documents, and for a given model a random sample of KV heads with up to "
    f"{HEADS} query heads, on sentences of the probe set. Spread: standard deviation of the drifts KL(original ‖ quantized) "
    "over their mean. Coupling: loss(a, b) − loss(a) − loss(b) + loss, root mean square over pairs, relative to that of the "
    "single costs. In both, squares are products of two halves of the texts, so that variation due to texts cancels. Keys "
    f"and values: drift by cached keys at {BITS} bits over drift by cached values. Intervals are over seeds, or over texts "
    "for a single model.",
    rule=f"Three properties are tested for each model: heads are uneven (spread above {MIN_SPREAD:g}), pairs are coupled "
    f"(above {MIN_COUPLING:g}), keys differ from values (by a factor of {FACTOR:g}, either way). Each is shown if "
    "significant, not so if significantly false, else open. Holds if all are shown, does not hold if more than half are "
    "not so. Otherwise depends: on the property and the model if any is not so, else undecided.",
    judged=statistic_key_selector(*THRESHOLDS),
    primary=PrimaryQuantity(SPREAD, SYNTHETIC_MODELS, MIN_SPREAD, "above", planned_seeds=14),
    measure=measure,
    judge=judge,
    plot=PlotSpec((SPREAD, COUPLING, KEY_VALUE), y="ratio, or log2 ratio"),
    training_configs=training_configs,
    measure_model=measure_model,
)
