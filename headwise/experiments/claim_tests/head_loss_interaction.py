"""Without mixing by W_O, heads do not interact."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis import TargetBatch, compare_heads
from headwise.experiments.claim import Claim, PlotSpec, PrimaryQuantity, Verdict
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import MultiHeadAttention
from headwise.kernels import causal
from headwise.model import ModelProtocol, Transformer, eval_mode

TEXTS, MAX_LENGTH = 48, 128
ROWS = 128  # text rows on which head outputs are compared
ROUNDING = 1e-5
MAX_INTERACTION = 0.05  # relative to the sum of the two single costs
LEARNED_OUTPUT, NO_MIXING = "W_O as learned", "no mixing"


@torch.no_grad()
def output_nonadditivity(layer: MultiHeadAttention, x: Tensor, first: int = 0, second: int = 1) -> float:
    """Return the relative deviation from additivity in the layer output when two heads are silenced together and singly.

    >>> output_nonadditivity(MultiHeadAttention(width=8, heads=2), torch.randn(1, 5, 8)) < 1e-5
    True
    """
    H = len(layer.spec.head_ids)

    def without(*heads: int) -> Tensor:
        gate = torch.ones(H)
        gate[list(heads)] = 0
        return layer(x, mask=causal(), gate=gate)  # (B, T, D)

    full = without()
    return float((full - without(first) - without(second) + without(first, second)).norm() / full.norm())


@torch.no_grad()
def mean_pair_loss_nonadditivity(
    model: ModelProtocol, corpus: Any = None, *, pairs: int | None = None, texts: int = TEXTS, seed: int = 0
) -> float:
    """Return the deviation from additivity in the loss for pairs of heads of one layer, relative to their single costs.

    Σ |cost of both − cost of first − cost of second| over Σ (|cost of first| + |cost of second|). A cost is the increase of
    the loss when heads are silenced.

    Args:
        model: Model to measure.
        corpus: Texts. Default: the default corpus of the model.
        pairs: Number of randomly drawn pairs. Default: all pairs.
        texts: Number of texts.
        seed: Seed of the draw.
    """
    all_pairs = [
        pair for hook_point in model.hook_points() for pair in combinations(map(str, hook_point.head_addresses), 2)
    ]
    order = np.random.default_rng(seed).permutation(len(all_pairs))[:pairs]
    selected = [all_pairs[index] for index in sorted(order)]
    target_batch = TargetBatch.of(model, corpus, texts=texts, max_length=MAX_LENGTH)

    def predictions(*heads: str) -> Tensor:
        return target_batch.score_hidden_states(
            model, target_batch.select_target_rows(target_batch.final_hidden_states(model, dict.fromkeys(heads, 0.0)))
        )

    with eval_mode(model):
        clean = predictions()

        def cost(*heads: str) -> float:
            return float(target_batch.loss_increase(predictions(*heads), clean).sum())

        single_costs = {head: cost(head) for head in dict.fromkeys(head for pair in selected for head in pair)}
        deviations = [abs(cost(*pair) - single_costs[pair[0]] - single_costs[pair[1]]) for pair in selected]
    total_cost = sum(abs(single_costs[first]) + abs(single_costs[second]) for first, second in selected)
    return sum(deviations) / total_cost if total_cost > 0 else 0.0


def output_overlap_and_cosine(model: ModelProtocol, corpus: Any = None) -> tuple[float, float, float]:
    """Return the overlap of the write subspaces of a layer's heads, its chance level, and the mean output cosine."""
    comparison = compare_heads(model, corpus, rows=ROWS)
    layers = list(comparison.mean_by_layer().values())
    overlap, cosine = (float(np.nanmean([layer[name] for layer in layers])) for name in ("write", "output"))
    return overlap, float(comparison.baselines["write"]), cosine


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    yield "interaction in the loss", NO_MIXING
    yield "interaction left without mixing", None


def training_configs(experiment: TrainedModelProvider) -> list[ExperimentConfig]:
    """Return the default model, and a model with W_O fixed to the identity."""
    return [
        experiment.make_config(seed, init=init) for init in ("default", "identity W_O") for seed in experiment.seeds
    ]


def measure(experiment: TrainedModelProvider) -> StatisticTable:
    """Measure both models on held-out text."""
    statistics, interactions = StatisticTable(), {}
    for init, name in (("default", LEARNED_OUTPUT), ("identity W_O", NO_MIXING)):
        models = [
            experiment.train_or_load(experiment.make_config(seed, init=init)).load_model() for seed in experiment.seeds
        ]
        texts = [experiment.held_out_corpus(seed) for seed in experiment.seeds]
        interactions[name] = [
            mean_pair_loss_nonadditivity(model, corpus) for model, corpus in zip(models, texts, strict=True)
        ]
        statistics.add("interaction in the loss", name, interactions[name])
        statistics.add("interaction within the layer", name, [_max_layer_interaction(model) for model in models])
        _add_output_overlap(
            statistics,
            name,
            [output_overlap_and_cosine(model, corpus) for model, corpus in zip(models, texts, strict=True)],
        )
    remaining = [
        none / learned if learned > 0 else 1.0
        for none, learned in zip(interactions[NO_MIXING], interactions[LEARNED_OUTPUT], strict=True)
    ]
    return statistics.add("interaction left without mixing", None, remaining)


def _max_layer_interaction(model: Transformer) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 32, model.spec.width, generator=generator, device="cpu")
    with eval_mode(model):
        return max(output_nonadditivity(layer, x) for layer in model.attention_layers() if len(layer.spec.head_ids) > 1)


def _add_output_overlap(statistics: StatisticTable, name: str, overlaps: list[tuple[float, float, float]]) -> None:
    statistics.add("overlap of write subspaces", name, [overlap for overlap, _, _ in overlaps])
    statistics.add("overlap of write subspaces", "chance", [chance for _, chance, _ in overlaps])
    statistics.add("cosine of writes", name, [cosine for _, _, cosine in overlaps])


def judge(statistics: StatisticTable) -> Verdict:
    """Apply the rule of CLAIM."""
    if any(
        max(statistic.values) > ROUNDING
        for statistic in statistics.by_condition("interaction within the layer").values()
    ):
        return Verdict(
            "does not hold", "heads are not additive in the output of their own layer, so the sum over heads is broken"
        )
    interaction_statistic, remaining = (
        statistics["interaction in the loss", NO_MIXING],
        statistics["interaction left without mixing"],
    )
    if interaction_statistic.is_interval_below(MAX_INTERACTION):
        return Verdict("holds")
    if remaining.is_interval_below(0.5):
        return Verdict(
            "depends", "on later layers: without W_O less than half of the interaction remains, through later layers"
        )
    if interaction_statistic.is_interval_above(MAX_INTERACTION) and remaining.is_interval_above(0.5):
        return Verdict("does not hold", "heads interact through later layers and norms, with or without W_O")
    return Verdict("undecided", "the interaction without W_O varies too much")


CLAIM = Claim(
    number=13,
    name="output-mixing",
    statement="Without mixing by W_O, heads do not interact.",
    counterevidence="Heads that are concatenated and never mixed, but whose effects on the loss depend on each other.",
    setup="Two heads of a layer are silenced together and singly. The effects of heads that do not interact add up. This is "
    "tested in the output of the layer, where it must be true with or without W_O, and in the loss after later layers, for "
    "the default model and for a model trained with W_O fixed to the identity: the deviation relative to the single costs, "
    "over all pairs. The overlap of write subspaces (chance d/D, 0 for the identity) and the cosine of head outputs on text "
    "are also reported. Whether mixing helps is not tested.",
    rule=f"The loss decides. (If heads deviate from additivity in a layer's output by more than {ROUNDING:g}, it does not "
    "hold, and the code is wrong.) Holds if the interaction in the loss without mixing is significantly below "
    f"{MAX_INTERACTION:g}. Depends if it is significantly less than half of the default model's. Does not hold if it is "
    f"significantly more than half and above {MAX_INTERACTION:g}. Otherwise undecided.",
    identity="in the output of their own layer the effects of heads add up, with or without W_O: it is a sum over heads",
    judged=_judged_statistics,
    primary=PrimaryQuantity("interaction in the loss", NO_MIXING, MAX_INTERACTION, "below", planned_seeds=6),
    measure=measure,
    judge=judge,
    plot=PlotSpec(("interaction in the loss", "interaction within the layer"), y="relative to the single costs"),
    training_configs=training_configs,
)
