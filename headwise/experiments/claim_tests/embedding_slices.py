"""Heads do not partition the embedding: each reads all of it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headwise.analysis import compare_weights, fold_norms_into_heads
from headwise.errors import HeadwiseError
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.experiments.head_diversity import head_diversity
from headwise.model import ModelProtocol

MIN_LOSS = 0.02  # nats: 2 % of perplexity
MIN_OVERLAP = 0.5  # of the overlap that subspaces drawn at random have
FULL, SLICED, WIDER = "full input", "slices", "slices with wider MLPs"


def input_overlap(model: ModelProtocol) -> float:
    """How much the spaces that heads of a layer read overlap, over chance: 1 as if drawn at random, 0 a partition.

    Mean of queries, keys and values over the pairs of each layer; norms before a layer are folded into its weights. What
    heads share by construction, as the keys of a group, is left out.
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
        raise HeadwiseError("no layer of this model has two heads, so there is no overlap; give one with more heads.")
    return float(np.mean(overlaps))


def own_slice_weight_ratio(model: ModelProtocol) -> float:
    """The share of a head's reading weights, squared, that lies in its own slice of the channels, over chance.

    1: its slice is to it as any other; as many as there are heads: it reads that slice alone.
    """
    ratios = []
    with torch.no_grad():
        for head in model.heads:
            heads, head_index = model.spec.attention.heads, head.address.head
            low, high = (model.spec.width * n // heads for n in (head_index, head_index + 1))
            square = torch.cat([head.W_Q, head.W_K, head.W_V], 1).float().square().sum(1)  # (D,)
            ratios.append(float(square[low:high].mean() / square.mean()))
    return float(np.mean(ratios))


def measure(experiment: ExperimentContext) -> StatisticTable:
    """The usual model beside one whose heads read a slice each, and one that makes up for the parameters in its MLPs."""
    statistics, texts = StatisticTable(), experiment.held_out_corpus()
    trained = {
        name: [experiment.train_or_load(config) for config in group]
        for name, group in _configs_by_kind(experiment).items()
    }
    for name, group in trained.items():
        statistics.add("loss", name, [run.loss for run in group])
        statistics.add("parameters", name, group[0].config.spec.num_parameters)
        for relation in group[0].probe_accuracy:
            statistics.add(f"right, {name}", relation, [run.probe_accuracy[relation] for run in group])
        models = [run.load_model() for run in group]
        statistics.add("maps apart (JS)", name, [head_diversity(model, texts)["js"] for model in models])
        statistics.add("overlap of what heads read, over chance", name, [input_overlap(model) for model in models])
        statistics.add(
            "weight in the own slice, over chance", name, [own_slice_weight_ratio(model) for model in models]
        )
    for name in (SLICED, WIDER):
        pairs = zip(trained[name], trained[FULL], strict=True)
        statistics.add("lost by slices", name, [run.loss - reference.loss for run, reference in pairs])
    return statistics


def measure_model(model: ModelProtocol, text: Any = None) -> StatisticTable:
    """What the heads of a model read, by their weights."""
    statistics = StatisticTable().add("overlap of what heads read, over chance", FULL, input_overlap(model))
    return statistics.add("weight in the own slice, over chance", FULL, own_slice_weight_ratio(model))


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    overlap = statistics["overlap of what heads read, over chance", FULL]
    details = f"what heads read overlaps {overlap.mean:.2f} times as much as by chance"
    if overlap.is_interval_below(MIN_OVERLAP):
        return Verdict("does not hold", details)
    if not overlap.is_interval_above(MIN_OVERLAP):
        return Verdict("depends", f"on the seed: {details}, and the interval covers {MIN_OVERLAP:g}")
    lost = {str(name): statistic for name, statistic in statistics.by_condition("lost by slices").items()}
    not_worse = [name for name, statistic in lost.items() if statistic.is_interval_below(MIN_LOSS)]
    unsure = [
        name for name, statistic in lost.items() if not statistic.is_interval_above(MIN_LOSS) and name not in not_worse
    ]
    if not_worse:
        details = f"heads read overlapping spaces, but {' and '.join(not_worse)} lose less than {MIN_LOSS:g} nats"
        return Verdict("depends", f"on what is asked: {details}")
    if unsure:
        names = " and ".join(unsure)
        details = f"heads read overlapping spaces, but whether {names} lose more than {MIN_LOSS:g} nats stays open"
        return Verdict("depends", f"on the seed: {details}")
    return Verdict("holds")


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    yield "overlap of what heads read, over chance", FULL
    yield from (("lost by slices", name) for name in statistics.by_condition("lost by slices"))


def training_configs(experiment: ExperimentContext) -> Iterable[ExperimentConfig]:
    """All three kinds."""
    return [config for group in _configs_by_kind(experiment).values() for config in group]


def _configs_by_kind(experiment: ExperimentContext) -> dict[str, list[ExperimentConfig]]:
    full, sliced = (
        [experiment.make_config(seed) for seed in experiment.seeds],
        [experiment.make_config(seed, head_input="slice") for seed in experiment.seeds],
    )
    return {FULL: full, SLICED: sliced, WIDER: [_match_parameters(a, b) for a, b in zip(sliced, full, strict=True)]}


def _match_parameters(config: ExperimentConfig, reference: ExperimentConfig) -> ExperimentConfig:
    """A point with MLPs so wide that it has as many parameters as another."""
    spec = config.spec
    missing = reference.spec.num_parameters - spec.num_parameters
    extra_hidden = round(missing / (spec.layers * (2 * spec.width + spec.mlp_bias)))
    return replace(config, spec=replace(spec, mlp_width=spec.mlp_width + extra_hidden))


CLAIM = Claim(
    number=11,
    name="input-slices",
    statement="Heads do not partition the embedding: each reads all of it through projections of its own, and that matters.",
    counterevidence="Heads whose reading spaces hardly overlap; or models whose heads read a slice of the embedding "
    "each and are as good.",
    setup="The usual model, beside one whose head h sees channels h·d to (h + 1)·d alone, and beside that one with "
    "MLPs so wide that parameters are as many (slices save most of W_Q, W_K and W_V). Losses are paired by seed; "
    "overlap is the mean Σ cos² of principal angles between what two heads of a layer read, over that of random "
    "subspaces.",
    rule=f"Does not hold if what heads read overlaps surely less than {MIN_OVERLAP:g} times as much as by chance, "
    "depends on the seed if neither surely less nor surely more. If more, holds if slices, with fewer parameters and "
    f"with as many, surely lose more than {MIN_LOSS:g} nats a token; depends on what is asked if one of them surely "
    "loses less, else on the seed. On a given model the overlap alone decides.",
    judged=_judged_statistics,
    measure=measure,
    judge=judge,
    plot=PlotSpec(("loss", "overlap of what heads read, over chance"), y="nats a token; times chance"),
    training_configs=training_configs,
    measure_model=measure_model,
)
