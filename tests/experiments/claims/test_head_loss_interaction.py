import pytest
import torch

import headwise as hw
from headwise.analysis.ablation.importance import importance
from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests.head_loss_interaction import (
    CLAIM,
    LEARNED_OUTPUT,
    NO_MIXING,
    judge,
    mean_pair_loss_nonadditivity,
    measure,
    output_nonadditivity,
)
from headwise.experiments.engine.statistic import StatisticTable
from headwise.heads import MultiHeadAttention
from tests.attached.test_analysis import build, documents
from tests.experiments.tiny import tiny_experiment

LOSS, LAYER, REMAINING = "interaction in the loss", "interaction within the layer", "interaction left without mixing"


def make_rows(none, remaining):
    return [
        (LAYER, NO_MIXING, 1e-7),
        (LOSS, LEARNED_OUTPUT, [0.5, 0.52, 0.5]),
        (LOSS, NO_MIXING, none),
        (REMAINING, None, remaining),
    ]


CASES = {
    "holds": make_rows([0.01, 0.012, 0.01], [0.02, 0.02, 0.02]),
    "depends": make_rows([0.2, 0.21, 0.2], [0.4, 0.4, 0.41]),
    "does not hold": make_rows([0.5, 0.51, 0.5], [1.0, 0.98, 1.0]),
}


@pytest.mark.parametrize(
    ("none", "remaining", "layer", "word"),
    [
        ([0.2, 0.21, 0.2], [0.3, 0.6, 0.7], 1e-7, "undecided"),  # more than half, or less: open
        ([0.0, 0.06, 0.2], [1.0, 0.98, 1.0], 1e-7, "undecided"),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0.1, "does not hold"),
    ],
)
def test_output_mixing_open_interval_depends(none, remaining, layer, word):
    statistics = (
        StatisticTable().add(LOSS, NO_MIXING, none).add(REMAINING, None, remaining).add(LAYER, NO_MIXING, layer)
    )
    verdict = judge(statistics)
    assert verdict.word == word


def test_output_mixing_not_available_for_given_model():
    assert CLAIM.measure_model is None


def test_within_layer_head_outputs_add_up():
    torch.manual_seed(0)
    layer = MultiHeadAttention(width=12, heads=3, out_bias=True)
    assert output_nonadditivity(layer, torch.randn(2, 7, 12), 0, 2) < 1e-6


def test_interaction_zero_output_heads_is_zero(tmp_path):
    # Two heads that write nothing cost nothing, singly or together.
    experiment = tiny_experiment(tmp_path)
    model = experiment.train_or_load(experiment.make_config(0)).load_model()
    with torch.no_grad():
        for layer in model.attention_layers():
            layer.output_projection.weight.zero_()
    assert mean_pair_loss_nonadditivity(model, experiment.held_out_corpus(), texts=4) == 0


def test_interaction_opposite_heads_equals_closed_form(tmp_path):
    # Head 1 undoes head 0, so taking both away costs nothing, and they are as far off as their single costs a and b sum to.
    experiment = tiny_experiment(tmp_path)
    model = experiment.train_or_load(experiment.make_config(0, heads=2)).load_model()
    with torch.no_grad():
        for layer in model.attention_layers():
            first, second = layer.heads
            for projection in "QKV":
                getattr(second, f"W_{projection}").copy_(getattr(first, f"W_{projection}"))
            second.W_O.copy_(-first.W_O)
    costs = importance(model, experiment.held_out_corpus(), ablation="zero").mean.reshape(
        2, 2
    )  # two layers of two heads
    expected = abs(costs.sum(1)).sum() / abs(costs).sum()
    assert mean_pair_loss_nonadditivity(model, experiment.held_out_corpus()) == pytest.approx(expected, rel=1e-3)


def test_output_mixing_tiny_experiment_gives_statistics(tmp_path):
    statistics = measure(tiny_experiment(tmp_path))
    assert judge(statistics).word in VERDICTS
    assert statistics["overlap of write subspaces", NO_MIXING].mean == 0
    assert statistics["cosine of writes", NO_MIXING].mean == 0
    assert statistics["overlap of write subspaces", "chance"].mean == 0.25
    assert statistics[REMAINING].mean == pytest.approx(
        statistics[LOSS, NO_MIXING].mean / statistics[LOSS, LEARNED_OUTPUT].mean
    )


def test_interaction_attached_model_is_deterministic():
    model = hw.attach(*build("llama"))
    value = mean_pair_loss_nonadditivity(model, documents(24), pairs=2, texts=4)
    assert value == mean_pair_loss_nonadditivity(model, documents(24), pairs=2, texts=4) > 0
