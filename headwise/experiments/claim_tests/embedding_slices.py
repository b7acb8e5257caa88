"""Heads do not partition the embedding: each reads all of it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headwise.analysis import compare_weights, fold_norms_into_heads
from headwise.errors import UnsupportedModelError
from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable
from headwise.experiments.mean_head_diversity import mean_head_diversity
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.model import ModelProtocol

MIN_LOSS = 0.02  # nats, about 2% of perplexity
MIN_OVERLAP = 0.5  # relative to the overlap of random subspaces
FULL, SLICED, WIDER = "full input", "slices", "slices with wider MLPs"


def input_overlap(model: ModelProtocol) -> float:
    """Return the overlap of the input subspaces of a layer's heads, over chance (1: random, 0: a partition).

    Mean over queries, keys and values and over the head pairs of each layer. Norms before a layer are folded into its
    weights. Weights that heads share by construction, such as the keys of a group, are excluded.
    """
    spec, overlaps = model.spec.attention, []
    head_dims = {"read_q": spec.head_dim, "read_k": spec.head_dim, "read_v": spec.value_dim}
    with torch.no_grad():
        for hook_point in model.hook_points():
            matrices = compare_weights(fold_norms_into_heads(model, hook_point.head_addresses))
            off_diagonal = ~np.eye(len(hook_point.head_addresses), dtype=bool)
            overlaps += [
                np.nanmean(matrices[name][off_diagonal]) * spec.width / head_dims[name]
                for name in head_dims
                if np.isfinite(matrices[name][off_diagonal]).any()
            ]
    if not overlaps:
        raise UnsupportedModelError(
            "model: no layer has two heads, so overlap cannot be measured. Use a model with more heads."
        )
    return float(np.mean(overlaps))


def own_slice_weight_ratio(model: ModelProtocol) -> float:
    """Return the fraction of a head's squared input weights in its own slice of the channels, relative to chance.

    1 means that its slice is like any other. The number of heads means that the head reads only that slice.
    """
    ratios = []
    with torch.no_grad():
        for head in model.heads:
            heads, head_index = model.spec.attention.heads, head.address.head
            low, high = (model.spec.width * n // heads for n in (head_index, head_index + 1))
            square = torch.cat([head.W_Q, head.W_K, head.W_V], 1).float().square().sum(1)  # (D,)
            ratios.append(float(square[low:high].mean() / square.mean()))
    return float(np.mean(ratios))


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Compare the default model with a model whose heads read one slice each, with and without wider MLPs."""
    statistics, texts = StatisticTable(), experiment.held_out_corpus()
    trained = {
        name: [experiment.train_or_load(config) for config in group]
        for name, group in _configs_by_kind(experiment).items()
    }
    for name, group in trained.items():
        statistics.add("loss", name, [run.loss for run in group])
        statistics.add("parameters", name, group[0].config.spec.num_parameters)
        for relation in group[0].probe_accuracy:
            statistics.add_proportion(f"right, {name}", relation, [run.probe_accuracy[relation] for run in group])
        models = [run.load_model() for run in group]
        statistics.add("maps apart (JS)", name, [mean_head_diversity(model, texts)["js"] for model in models])
        statistics.add("overlap of what heads read, over chance", name, [input_overlap(model) for model in models])
        statistics.add(
            "weight in the own slice, over chance", name, [own_slice_weight_ratio(model) for model in models]
        )
    for name in (SLICED, WIDER):
        pairs = zip(trained[name], trained[FULL], strict=True)
        statistics.add("lost by slices", name, [run.loss - reference.loss for run, reference in pairs])
    return statistics


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """Measure the overlap of the input weights of a model's heads."""
    statistics = StatisticTable().add("overlap of what heads read, over chance", FULL, input_overlap(model))
    return statistics.add("weight in the own slice, over chance", FULL, own_slice_weight_ratio(model))


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    overlap = statistics["overlap of what heads read, over chance", FULL]
    details = f"the input subspaces of heads overlap {overlap.mean:.2f} times as much as by chance"
    if overlap.is_interval_below(MIN_OVERLAP):
        return Verdict("does not hold", details)
    if not overlap.is_interval_above(MIN_OVERLAP):
        return Verdict("undecided", f"{details}, and the interval includes {MIN_OVERLAP:g}")
    lost = {str(name): statistic for name, statistic in statistics.by_condition("lost by slices").items()}
    not_worse = [name for name, statistic in lost.items() if statistic.is_interval_below(MIN_LOSS)]
    unsure = [
        name for name, statistic in lost.items() if not statistic.is_interval_above(MIN_LOSS) and name not in not_worse
    ]
    if not_worse:
        details = f"the input subspaces overlap, but {' and '.join(not_worse)} lose less than {MIN_LOSS:g} nats"
        return Verdict("depends", f"on the criterion: {details}")
    if unsure:
        names = " and ".join(unsure)
        details = f"the input subspaces overlap, but whether {names} lose more than {MIN_LOSS:g} nats is inconclusive"
        return Verdict("undecided", details)
    return Verdict("holds")


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    yield "overlap of what heads read, over chance", FULL
    yield from (("lost by slices", name) for name in statistics.by_condition("lost by slices"))


def training_configs(experiment: TrainedModelProvider) -> Iterable[ExperimentConfig]:
    """Return all three kinds of models."""
    return [config for group in _configs_by_kind(experiment).values() for config in group]


def _configs_by_kind(experiment: TrainedModelProvider) -> dict[str, list[ExperimentConfig]]:
    full, sliced = (
        [experiment.make_config(seed) for seed in experiment.seeds],
        [experiment.make_config(seed, head_input="slice") for seed in experiment.seeds],
    )
    return {FULL: full, SLICED: sliced, WIDER: [_match_parameters(a, b) for a, b in zip(sliced, full, strict=True)]}


def _match_parameters(config: ExperimentConfig, reference: ExperimentConfig) -> ExperimentConfig:
    """Widen the MLPs of a configuration so that its parameter count matches a reference."""
    spec = config.spec
    missing = reference.spec.num_parameters - spec.num_parameters
    extra_hidden = round(missing / (spec.layers * (2 * spec.width + spec.mlp_bias)))
    return replace(config, spec=replace(spec, mlp_width=spec.mlp_width + extra_hidden))


CLAIM = Claim(
    number=11,
    name="input-slices",
    statement="Heads do not partition the embedding: each reads all of it through projections of its own, and that matters.",
    counterevidence="Heads whose input subspaces hardly overlap, or models whose heads read one slice of the embedding each "
    "and are as good.",
    setup="The default model, a model whose head h reads only channels h·d to (h + 1)·d, and the same model with MLPs "
    "widened to the parameter count of the default model (slices save most of W_Q, W_K and W_V). Losses are paired by seed. "
    "Overlap is the mean Σ cos² of the principal angles between the input subspaces of two heads of a layer, relative to "
    "random subspaces.",
    rule=f"Does not hold if the input subspaces overlap significantly less than {MIN_OVERLAP:g} times as much as by chance. "
    "Undecided if the overlap is inconclusive. If it is significantly larger: holds if both sliced models lose "
    f"significantly more than {MIN_LOSS:g} nats per token, depends on the criterion if one of them loses significantly "
    "less, else undecided. On a given model only the overlap is judged.",
    judged=_judged_statistics,
    primary=PrimaryQuantity("lost by slices", WIDER, MIN_LOSS, "above", planned_seeds=6),
    version=2,
    measure=measure,
    judge=judge,
    plot=PlotSpec(("loss", "overlap of what heads read, over chance"), y="nats per token; ratio to chance"),
    training_configs=training_configs,
    measure_model=measure_model,
)
