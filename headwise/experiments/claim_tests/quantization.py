"""Quantisation hits heads asymmetrically, and couples them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from headwise.analysis import default_corpus, eval_corpus, joint_quantization_costs, sensitivity
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, PlotSpec, Verdict, format_labeled_lists, statistic_key_selector
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.model import ModelProtocol

BITS = 3  # few enough to cost something
HEADS = 24  # of a large model: key heads are drawn as long as no more heads than these read them
DOCUMENTS = 64  # that little models are asked about
TEXTS, SENTENCES = 16, 4  # where no text is given: so many, of so many sentences each
DRAWS = 2000  # of texts, for intervals of a single model
MIN_SPREAD, MIN_COUPLING = 0.5, 0.1  # of the mean of heads; of what two heads cost alone
FACTOR = 1.5  # between keys and values
SPREAD, COUPLING, KEY_VALUE = "spread over heads", "coupling of pairs", "cached keys against values, doublings"
THRESHOLDS = {SPREAD: MIN_SPREAD, COUPLING: MIN_COUPLING, KEY_VALUE: float(np.log2(FACTOR))}
Halves = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class QuantizationCosts:
    """What few bits cost some key heads of a model, text by text; every second text is the other half."""

    drifts: np.ndarray  # (heads, texts): each head's weights alone
    singles: np.ndarray  # (heads, texts): the loss
    pairs: np.ndarray  # (pairs, texts): the loss with two heads' weights at few bits
    pair_heads: np.ndarray  # (pairs, 2): their heads
    all_heads: np.ndarray  # (texts,): the loss with all of these heads at few bits
    key_drifts: np.ndarray  # (heads, texts): drift by cached keys
    value_drifts: np.ndarray  # (heads, texts): by cached values
    counts: np.ndarray  # (texts,)

    def bootstrap_statistic(self, compute: "CostStatistic", seed: int = 0) -> Statistic:
        """A statistic of one model, with its interval over texts, drawn anew within each half."""
        rng, n = np.random.default_rng(seed), len(self.counts)
        resampled = []
        for _ in range(DRAWS):
            text_weights = np.zeros(n)
            for half in (0, 1):
                half_indices = np.arange(half, n, 2)
                text_weights += np.bincount(rng.choice(half_indices, len(half_indices)), minlength=n)
            resampled.append(compute(self, text_weights))
        is_finite = bool(np.isfinite(resampled).all())  # what some draws cannot tell is not known
        low, high = np.percentile(resampled, (2.5, 97.5)) if is_finite else (-np.inf, np.inf)
        return Statistic.with_interval(compute(self, np.ones(n)), float(low), float(high))

    def half_means(self, sums: np.ndarray, text_weights: np.ndarray) -> Halves:
        """Means a token over either half of the texts, each text so many times: (items,) twice."""
        first, second = (
            (sums[:, half] @ text_weights[half]) / (self.counts[half] @ text_weights[half])
            for half in _half_slices(len(text_weights))
        )
        return first, second


CostStatistic = Callable[[QuantizationCosts, np.ndarray], float]


def _half_slices(n: int) -> tuple[slice, slice]:
    return slice(0, n, 2), slice(1, n, 2)


def cost_spread(costs: QuantizationCosts, text_weights: np.ndarray) -> float:
    """How far heads lie apart, beyond what other texts would change: the standard deviation of drifts over their mean.

    The variance is the covariance between halves of the texts: what is due to texts is not the same in both, and drops out.
    """
    first, second = costs.half_means(costs.drifts, text_weights)
    covariance = ((first - first.mean()) * (second - second.mean())).sum() / (len(first) - 1)
    mean = (first.mean() + second.mean()) / 2
    return float(np.sqrt(max(0.0, covariance)) / mean) if mean > 0 else 0.0


def head_pair_interaction(costs: QuantizationCosts, text_weights: np.ndarray) -> float:
    """How large couplings are against what the two heads cost: loss(a, b) − loss(a) − loss(b) + loss, root mean square over
    pairs, against that of loss(a) + loss(b) − 2 loss. Squares are products of both halves, so that noise drops out."""
    first, second = (costs.singles[costs.pair_heads[:, side]] for side in (0, 1))  # (pairs, texts)
    single_costs = first + second
    deviation, size = (
        float(np.mean(np.multiply(*costs.half_means(sums, text_weights))))
        for sums in (costs.pairs - single_costs, single_costs)
    )
    return float(np.sqrt(max(0.0, deviation) / size)) if size > 0 else float("nan")


def key_value_log2_ratio(costs: QuantizationCosts, text_weights: np.ndarray) -> float:
    """How many times cached keys drift further than cached values, in doublings; below 0 values drift further."""
    keys, values = (float((sums @ text_weights).sum()) for sums in (costs.key_drifts, costs.value_drifts))
    return float(np.log2(keys / values)) if keys > 0 and values > 0 else 0.0


def additivity(costs: QuantizationCosts, text_weights: np.ndarray) -> float:
    """What all heads cost at once, against the sum of what each costs alone."""
    single_cost = float((costs.singles @ text_weights).sum())
    return float(costs.all_heads @ text_weights) / single_cost if single_cost > 0 else float("nan")


COST_STATISTICS: dict[str, CostStatistic] = {
    SPREAD: cost_spread,
    COUPLING: head_pair_interaction,
    KEY_VALUE: key_value_log2_ratio,
    "all at once, of the sum": additivity,
}


def weight_and_cache_quantization_costs(
    model: ModelProtocol, texts: Any, bits: int = BITS, heads: int = HEADS, seed: int = 0
) -> QuantizationCosts:
    """What few bits cost key heads alone and in pairs; of a model with more heads those are drawn."""
    kv_heads = sampled_kv_heads(model, heads, seed)
    pairs = list(combinations(range(len(kv_heads)), 2))
    if not pairs:
        raise HeadwiseError("pairs need two key heads at least; this model has fewer.")
    sets = [*((kv_head,) for kv_head in kv_heads), *((kv_heads[a], kv_heads[b]) for a, b in pairs), tuple(kv_heads)]
    coupled = joint_quantization_costs(model, texts, sets, bits)
    if len(coupled.counts) < 4:
        raise HeadwiseError(f"intervals are over texts, two in each half at least; got {len(coupled.counts)} texts.")
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
    """Key heads, and the heads that read each."""
    heads_by_kv_head = {}
    for layer in model.attention_layers():
        address = layer.hook_point.address
        for kv_id, heads in zip(layer.spec.kv_head_ids, layer.spec.heads_of_kv, strict=True):
            heads_by_kv_head[str(address.head_address(kv_id))] = tuple(str(address.head_address(n)) for n in heads)
    return heads_by_kv_head


def sampled_kv_heads(model: ModelProtocol, heads: int = HEADS, seed: int = 0) -> list[str]:
    """Key heads, all of them or drawn by chance, that no more than so many heads read; in their order."""
    heads_by_kv_head = query_heads_by_kv(model)
    names, selected, num_heads = list(heads_by_kv_head), set[str](), 0
    for index in np.random.default_rng(seed).permutation(len(names)):
        num_heads += len(heads_by_kv_head[names[index]])
        if num_heads > heads:
            break
        selected.add(names[index])
    return [name for name in names if name in selected]


def training_configs(experiment: ExperimentContext) -> Iterator[ExperimentConfig]:
    """The usual model of every seed."""
    return (experiment.make_config(seed) for seed in experiment.seeds)


def measure(experiment: ExperimentContext) -> StatisticTable:
    """Every seed's model on held-out documents of that seed."""
    statistics, costs = StatisticTable(), list[QuantizationCosts]()
    for config in training_configs(experiment):
        model = experiment.train_or_load(config).load_model()
        costs.append(
            weight_and_cache_quantization_costs(
                model, eval_corpus(model, experiment.held_out_corpus(config.recipe.seed)).first(DOCUMENTS)
            )
        )
    for name, compute in COST_STATISTICS.items():
        values = [compute(entry, np.ones(len(entry.counts))) for entry in costs]
        statistics.add(name, SYNTHETIC_MODELS, values if len(values) > 1 else costs[0].bootstrap_statistic(compute))
    statistics.add("drift, nats a token", SYNTHETIC_MODELS, [_mean_drift(entry) for entry in costs])
    return statistics


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """The same with a model and its text."""
    statistics = StatisticTable()
    _add_costs(
        statistics,
        "given",
        weight_and_cache_quantization_costs(
            model, _default_texts(model) if text is None else eval_corpus(model, text).first(TEXTS)
        ),
    )
    return statistics


def _add_costs(statistics: StatisticTable, model_label: str, costs: QuantizationCosts) -> None:
    for name, compute in COST_STATISTICS.items():
        statistics.add(name, model_label, costs.bootstrap_statistic(compute))
    statistics.add("drift, nats a token", model_label, _mean_drift(costs))


def _mean_drift(costs: QuantizationCosts) -> float:
    """The mean of heads."""
    return float(costs.drifts.sum() / costs.counts.sum() / len(costs.drifts))


def _default_texts(model: ModelProtocol) -> list[str]:
    """Texts of some sentences of all kinds each, of the model's usual ones."""
    documents = [item.text for item in default_corpus(model).items()]
    stride = max(1, len(documents) // SENTENCES)
    return [" ".join(documents[start::stride][:SENTENCES]) for start in range(min(TEXTS, stride))]


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
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
    return Verdict("depends", f"on {'what is meant, and where' if refuted else 'the seed, or the text'}; {details}")


SYNTHETIC_MODELS = "little models"
FINDINGS = {SPREAD: "heads uneven", COUPLING: "pairs coupled", KEY_VALUE: "keys unlike values"}
CLAIM = Claim(
    number=26,
    name="quantization",
    statement="Quantisation hits heads asymmetrically, and couples them.",
    counterevidence="Heads that cost about the same at few bits, whose costs add up, and whose cached keys and values "
    "cost alike.",
    setup=f"Weights of one head, and of every pair, at {BITS} bits in groups of 32, balanced basis: all heads of usual "
    f"models on {DOCUMENTS} held-out documents; of a given model key heads drawn by chance that {HEADS} heads read, on "
    "sentences of the probe set. Spread: standard deviation of drifts KL(untouched ‖ rounded) over their mean. "
    "Coupling: loss(a, b) − loss(a) − loss(b) + loss, root mean square over pairs, against that of the two alone. In "
    "both, squares are products of two halves of the texts, so what is due to texts drops out. Sides: drift by cached "
    f"keys at {BITS} bits over that by cached values. Intervals over seeds, for one model over texts.",
    rule=f"Three things are said of each model: heads are uneven (spread above {MIN_SPREAD:g}), pairs are coupled "
    f"(above {MIN_COUPLING:g}), keys are unlike values (a factor of {FACTOR:g}, either way). Each is shown if surely "
    "so, not so if surely not, else open. Holds if all are shown, does not hold if more than half are not so. Else "
    "depends: on which if any is not so, on the seed or the text if some are open and none is not so.",
    judged=statistic_key_selector(*THRESHOLDS),
    measure=measure,
    judge=judge,
    plot=PlotSpec((SPREAD, COUPLING, KEY_VALUE), y="share, or doublings"),
    training_configs=training_configs,
    measure_model=measure_model,
)
