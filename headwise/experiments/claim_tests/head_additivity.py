"""Without mixing, heads do not know of each other."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.analysis import TargetBatch, compare_heads
from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable
from headwise.experiments.experiment_context import ExperimentContext
from headwise.heads import MultiHeadAttention
from headwise.kernels import causal
from headwise.model import ModelProtocol, Transformer, eval_mode

TEXTS, MAX_LENGTH = 48, 128
ROWS = 128  # on which what heads write is compared
ROUNDING = 1e-5
MAX_INTERACTION = 0.05  # of what the two cost singly
LEARNED_OUTPUT, NO_MIXING = "W_O as learned", "no mixing"


@torch.no_grad()
def output_nonadditivity(layer: MultiHeadAttention, x: Tensor, first: int = 0, second: int = 1) -> float:
    """How far two heads of a layer are from adding up in its output: silenced together, against each alone; relative.

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
def loss_nonadditivity(
    model: ModelProtocol, corpus: Any = None, *, pairs: int | None = None, texts: int = TEXTS, seed: int = 0
) -> float:
    """How far pairs of heads of one layer are from adding up in the loss, as a share of what they cost singly.

    Σ |cost of both − cost of one − cost of the other| over Σ (|cost of one| + |cost of the other|), where a cost is what the
    loss gains when heads are silenced. All pairs, or so many, drawn.
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
    """How far heads of a layer write into the same directions: the overlap of their subspaces, chance, and the mean cosine
    of what they write."""
    comparison = compare_heads(model, corpus, rows=ROWS)
    layers = list(comparison.mean_by_layer().values())
    overlap, cosine = (float(np.nanmean([layer[name] for layer in layers])) for name in ("write", "output"))
    return overlap, float(comparison.baselines["write"]), cosine


def _judged_statistics(statistics: StatisticTable) -> Iterator[tuple[str, Condition]]:
    yield "interaction in the loss", NO_MIXING
    yield "interaction left without mixing", None


def training_configs(experiment: ExperimentContext) -> list[ExperimentConfig]:
    """The usual model, and one whose W_O is the identity and stays so."""
    return [
        experiment.make_config(seed, init=init) for init in ("default", "identity W_O") for seed in experiment.seeds
    ]


def measure(experiment: ExperimentContext) -> StatisticTable:
    """Both models, on held-out text."""
    statistics, interactions = StatisticTable(), {}
    for init, name in (("default", LEARNED_OUTPUT), ("identity W_O", NO_MIXING)):
        models = [
            experiment.train_or_load(experiment.make_config(seed, init=init)).load_model() for seed in experiment.seeds
        ]
        texts = [experiment.held_out_corpus(seed) for seed in experiment.seeds]
        interactions[name] = [loss_nonadditivity(model, corpus) for model, corpus in zip(models, texts, strict=True)]
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
    x = torch.randn(1, 32, model.spec.width, generator=generator)
    with eval_mode(model):
        return max(output_nonadditivity(layer, x) for layer in model.attention_layers() if len(layer.spec.head_ids) > 1)


def _add_output_overlap(statistics: StatisticTable, name: str, overlaps: list[tuple[float, float, float]]) -> None:
    statistics.add("overlap of write subspaces", name, [overlap for overlap, _, _ in overlaps])
    statistics.add("overlap of write subspaces", "chance", [chance for _, chance, _ in overlaps])
    statistics.add("cosine of writes", name, [cosine for _, _, cosine in overlaps])


def judge(statistics: StatisticTable) -> Verdict:
    """By `rule`."""
    if any(
        max(statistic.values) > ROUNDING
        for statistic in statistics.by_condition("interaction within the layer").values()
    ):
        return Verdict(
            "does not hold", "heads do not add up in their layer's own output, which breaks the sum over heads"
        )
    interaction_statistic, remaining = (
        statistics["interaction in the loss", NO_MIXING],
        statistics["interaction left without mixing"],
    )
    if interaction_statistic.is_interval_below(MAX_INTERACTION):
        return Verdict("holds")
    if remaining.is_interval_below(0.5):
        return Verdict("depends", "on what comes behind: less than half is left without W_O, through later layers")
    if interaction_statistic.is_interval_above(MAX_INTERACTION) and remaining.is_interval_above(0.5):
        return Verdict("does not hold", "later layers and norms let heads meet, with W_O or without")
    return Verdict("depends", "on the seed: how far heads interact without W_O varies too much")


CLAIM = Claim(
    number=13,
    name="output-mixing",
    statement="Without mixing by W_O, heads do not know of each other.",
    counterevidence="Heads laid side by side and never mixed whose effects on the loss still hang on each other.",
    setup="Two heads of a layer are silenced together and singly. Heads that do not know of each other add up. Tested "
    "is the layer's own output, where they must, with W_O or without; and the loss, behind later layers, of the usual "
    "model and of one whose W_O is the identity in training too: as a share of what both cost singly, over all pairs. "
    "Beside it the overlap of write subspaces (chance d/D, 0 for the identity) and the cosine of what heads write on "
    "text. Not tested is whether mixing helps.",
    rule=f"The loss decides. (Should heads fail to add up in a layer's output, by more than {ROUNDING:g}, it does not "
    "hold, and the code is wrong.) Holds if without mixing the interaction in the loss is surely below "
    f"{MAX_INTERACTION:g}; depends if it surely is less than half of the usual model's; does not hold if it surely is "
    f"more than half and above {MAX_INTERACTION:g}; else depends on the seed.",
    identity="in their layer's own output heads add up, with W_O or without: it is a sum over heads",
    judged=_judged_statistics,
    measure=measure,
    judge=judge,
    plot=PlotSpec(("interaction in the loss", "interaction within the layer"), y="share of what both cost singly"),
    training_configs=training_configs,
)
