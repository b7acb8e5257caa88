from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from headwise.analysis.ablation.importance import importance
from headwise.analysis.ablation.recorded_head_outputs import mean_activations
from headwise.compression.pruning_curve import PruningCurves
from headwise.compression.select_heads import head_count_for_fraction
from headwise.errors import HeadwiseError
from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests import pruning
from headwise.experiments.claim_tests.pruning import (
    CLAIM,
    MIN_FRACTION,
    keep_fractions,
    max_prunable_fraction,
    measure_model,
    pruning_loss_increase_by_ranking,
)
from headwise.experiments.engine.statistic import StatisticTable
from headwise.model import Transformer
from tests.experiments.tiny import tiny_experiment

ONE_PERCENT, FIVE_PERCENT = (f"share that can go for less than {bar} more loss" for bar in ("1%", "5%"))
RANKED, RANDOM = "by what they are worth", "at random"
CASES = {
    "holds": [
        (ONE_PERCENT, RANKED, [0.25, 0.25, 0.5]),
        (FIVE_PERCENT, RANKED, [0.5, 0.5, 0.5]),
        (ONE_PERCENT, RANDOM, [0.0, 0.1, 0.0]),
    ],
    "does not hold": [
        (ONE_PERCENT, RANKED, [0, 0, 0]),
        (FIVE_PERCENT, RANKED, [0.1, 0.1, 0.1]),
        (ONE_PERCENT, RANDOM, [0, 0, 0]),
    ],
    "depends": [
        (ONE_PERCENT, RANKED, [0.1, 0.1, 0.1]),
        (FIVE_PERCENT, RANKED, [0.5, 0.5, 0.25]),
        (ONE_PERCENT, RANDOM, [0, 0, 0]),
    ],
    "undecided": [
        (ONE_PERCENT, RANKED, [0.1, 0.5, 0.25]),
        (FIVE_PERCENT, RANKED, [0.5, 0.5, 0.25]),
        (ONE_PERCENT, RANDOM, [0, 0, 0]),
    ],
}


def test_max_prunable_ends_at_first_costly_fraction():
    costs = [(0.5, 0.001), (0.1, 0.002), (0.25, 0.03)]
    assert max_prunable_fraction(costs, 0.01) == 0.1
    assert max_prunable_fraction(costs, 0.05) == 0.5
    assert max_prunable_fraction(costs, 0.001) == 0.0


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return tiny_experiment(tmp_path_factory.mktemp("lab"))


def test_loss_increase_only_active_head_matters(experiment):
    model, documents = (
        experiment.train_or_load(experiment.make_config(0)).load_model().double(),
        experiment.held_out_corpus(),
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for head in model.heads:
            head.W_O.zero_()
        model.heads["0.1"].W_O.normal_(std=3)
    increases = pruning_loss_increase_by_ranking(model, documents, documents, fractions=(0.5, 0.1))["ablation"]
    head_importance = importance(model, documents, heads="0.1", means=mean_activations(model, documents))
    # If it does harm, it is the first to go, and the others change nothing; if it helps, it stays, and nothing changes.
    assert abs(head_importance.mean[0]) > 1e-4
    assert [increase for _, increase in increases] == pytest.approx(
        [min(0, head_importance.mean[0]) / head_importance.clean_loss] * 2, rel=1e-4
    )
    assert [fraction for fraction, _ in increases] == pytest.approx([1 / 8, 1 / 2])


def test_pruning_claim_tiny_experiment_gives_verdict(experiment):
    statistics = CLAIM.measure(experiment)
    assert CLAIM.judge(statistics).word in VERDICTS
    assert all(len(statistics.by_condition(name)) >= 4 for name in CLAIM.plot.statistics)


def test_pruning_claim_given_model_gives_verdict(experiment):
    model = experiment.train_or_load(experiment.make_config(0)).load_model()
    statistics = measure_model(model, None)
    assert statistics.names == CLAIM.measure(experiment).names
    assert CLAIM.judge(statistics).word in VERDICTS


@pytest.mark.parametrize("heads", [4, 6, 7, 10, 16, 72, 270])
def test_keep_fractions_include_a_quarter(heads):
    # The smallest number of heads that is at least the requested fraction is pruned.
    remaining = [head_count_for_fraction(heads, keep) for keep in keep_fractions(heads)]
    num_pruned = min(heads - count for count in remaining if heads - count >= MIN_FRACTION * heads)
    assert num_pruned == -(-heads // 4)
    if heads == 16:
        assert remaining == [14, 12, 8, 4]


def test_relative_costs_quarter_of_heads():
    point = SimpleNamespace(heads=12, loss_increase=SimpleNamespace(mean=0.004))
    curve = cast(
        PruningCurves, SimpleNamespace(points_by_ranking=lambda ranking: [point], full_loss=SimpleNamespace(mean=2.0))
    )
    assert pruning._relative_curve_points(curve, "ablation", 16) == [(MIN_FRACTION, 0.002)]


def test_pruning_claim_one_seed_below_quarter_depends():
    rows = [
        (ONE_PERCENT, RANKED, [0.25, 0.125, 0.5]),
        (FIVE_PERCENT, RANKED, [0.5, 0.5, 0.5]),
        (ONE_PERCENT, RANDOM, [0, 0, 0]),
    ]
    statistics = StatisticTable()
    for row in rows:
        statistics.add(*row)
    assert str(CLAIM.judge(statistics)) == "undecided: between 12% and 50% can be pruned"


def test_loss_increase_model_without_output_raises(experiment):
    spec = experiment.train_or_load(experiment.make_config(0)).load_model().spec
    with pytest.raises(HeadwiseError, match="without an output"):
        pruning_loss_increase_by_ranking(Transformer(replace(spec, output="none")), experiment.held_out_corpus(), None)
