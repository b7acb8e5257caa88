from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests import head_dropout
from headwise.experiments.claim_tests.head_dropout import (
    CLAIM,
    DROPOUT,
    AblationSpread,
    ablation_spread,
    gini,
    judge,
    measure,
)
from headwise.experiments.engine.statistic import StatisticTable
from headwise.model import Transformer
from headwise.spec import preset
from tests.experiments.tiny import tiny_experiment

WORST, GINI, LOSS = "cost of the worst head, with over without", "Gini index, with − without", "loss, with over without"
CASES = {
    "holds": [(WORST, None, [0.4, 0.45, 0.5]), (GINI, None, [-0.2, -0.25, -0.22]), (LOSS, None, [1.05, 1.04, 1.05])],
    "does not hold": [
        (WORST, None, [1.1, 1.05, 1.15]),
        (GINI, None, [0.05, 0.07, 0.06]),
        (LOSS, None, [1.0, 1.0, 1.0]),
    ],
    "depends": [(WORST, None, [0.4, 0.45, 0.5]), (GINI, None, [0.1, 0.07, 0.05]), (LOSS, None, [1.0, 1.0, 1.0])],
}


def test_head_dropout_cost_is_reported_and_wide_interval_depends():
    statistics = StatisticTable()
    for name, position, values in CASES["holds"]:
        statistics.add(name, position, values)
    assert "4.7% more loss" in judge(statistics).detail
    statistics.add(WORST, None, [0.1, 0.1, 0.9])
    assert str(judge(statistics)) == "undecided: whether the worst head costs less is inconclusive"


@pytest.mark.parametrize(
    ("worst", "uneven", "reason"),
    [
        ([0.7, 0.9, 1.2], [0.04, 0.1, 0.05], "whether the worst head costs less is inconclusive"),
        ([0.7, 0.9, 1.2], [-0.1, 0.1, 0.0], "whether the worst head costs less and heads are needed more"),
        (0.5, 0.0, "on the criterion: the worst head costs less"),
        (1.0, -0.2, "on the criterion: heads are needed more evenly"),
    ],
)
def test_head_dropout_open_interval_depends(worst, uneven, reason):
    verdict = judge(StatisticTable().add(WORST, None, worst).add(GINI, None, uneven).add(LOSS, None, 1.0))
    assert verdict.word == ("depends" if reason.startswith("on ") else "undecided")
    assert verdict.detail.startswith(reason)


@pytest.mark.parametrize(
    ("values", "expected"),
    # Sorted, n values: Gini = Σ (2i − n − 1)·x_i / (n·Σx).
    [([1, 1, 1, 1], 0.0), ([0, 0, 0, 1], 3 / 4), ([1, 2, 3], (-2 * 1 + 2 * 3) / (3 * 6)), ([0, 0], 0.0)],
)
def test_gini_equals_closed_form(values, expected):
    assert gini(np.array(values, dtype=float)) == pytest.approx(expected)


def test_reliance_statistics_equal_closed_form(monkeypatch):
    losses = np.array([0.3, -0.1, 0.1, 0.0])
    monkeypatch.setattr(head_dropout, "importance", lambda *_, ablation: SimpleNamespace(mean=losses))
    result = ablation_spread(Transformer(preset("nano")), "a text")
    # The Gini index of 0, 0, 0.1 and 0.3 is (1·0.1 + 3·0.3) / (4·0.4).
    assert (result.worst, result.mean, result.top_fraction) == pytest.approx((0.3, 0.075, 0.75))
    assert result.gini == pytest.approx(1 / 1.6)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    return tiny_experiment(tmp_path_factory.mktemp("lab"))


def test_reliance_zero_output_heads_is_zero(experiment):
    model, documents = experiment.train_or_load(experiment.make_config(0)).load_model(), experiment.held_out_corpus()
    with torch.no_grad():
        for head in model.heads:
            head.W_O.zero_()
    assert ablation_spread(model, documents) == AblationSpread(0, 0, 0, 0)


def test_head_dropout_tiny_experiment_gives_verdict(experiment):
    statistics = measure(experiment)
    assert judge(statistics).word in VERDICTS
    for name in CLAIM.plot.statistics:
        assert list(statistics.by_condition(name)) == ["without", "with head dropout"]
    rates = [config.spec.attention.head_dropout for config in CLAIM.training_configs(experiment)]
    assert rates == [0, DROPOUT]
    assert CLAIM.measure_model is None
