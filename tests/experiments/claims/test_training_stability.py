import math

import pytest

from headwise.experiments.claim_tests.training_stability import CLAIM, loss_excess
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from tests.experiments.stub_experiment import stub_experiment

SPARED, SPREAD = "spared by many heads", "spread of one head over that of many"
CASES = {
    "holds": [
        (SPARED, 8, [0.5, 0.6, 0.7]),
        (SPARED, 32, [0.5, 0.6, 0.7]),
        (SPREAD, 8, Statistic.with_interval(2, 0.3, 12)),
    ],
    "depends": [(SPARED, 8, [0.5, 0.55, 0.6]), (SPARED, 32, [0.0, 0.01, 0.0])],
    "does not hold": [(SPARED, 8, [0.05, 0.06, 0.07]), (SPARED, 32, -0.4)],
}
WIDE_INTERVAL = Statistic.with_interval(0.63, -0.64, 1.9)


@pytest.mark.parametrize(
    ("eight", "thirty_two", "reason"),
    [
        (WIDE_INTERVAL, WIDE_INTERVAL, "whether high rates spare 8 and 32 heads"),
        (-0.4, WIDE_INTERVAL, "whether high rates spare 32 heads"),
        (0.6, WIDE_INTERVAL, "high rates significantly spare 8 heads, whether 32"),
        (0.6, -0.4, "on the head count: high rates significantly spare 8 of 8 and 32 heads"),
    ],
)
def test_stability_open_interval_depends(eight, thirty_two, reason):
    verdict = CLAIM.judge(StatisticTable().add(SPARED, 8, eight).add(SPARED, 32, thirty_two))
    assert verdict.word == ("depends" if reason.startswith("on ") else "undecided")
    assert verdict.detail.startswith(reason)


def test_stability_growing_spread_is_reported():
    statistics = StatisticTable()
    statistics.add(SPARED, 8, 0.5).add(SPREAD, 8, Statistic.with_interval(0.1, 0.02, 0.6))
    assert "what stable means" in CLAIM.judge(statistics).detail


def test_stability_stub_one_head_diverges(tmp_path):
    def stub_results(config):
        heads, rate_factor = config.spec.attention.heads, round(config.recipe.learning_rate / 2e-3)
        short_warmup = config.recipe.warmup == 4
        if short_warmup and heads == 1 and rate_factor == 15:
            return {"loss": None}  # diverged
        return {"loss": 2.0 + (heads == 1 and rate_factor == 5) + (0.0 if short_warmup else heads * config.recipe.seed)}

    experiment = stub_experiment(tmp_path, stub_results, (0, 1, 2))
    statistics = CLAIM.measure(experiment)
    worst = math.log(experiment.make_config(0).spec.vocab) - 2
    assert statistics["loss, one head", 2e-3 * 15].mean == math.inf
    assert statistics["cost of high rates", 1].mean == pytest.approx((1 + worst) / 2)
    assert statistics["runs lost", 1].mean == 1
    assert statistics["runs lost", 4].mean == 0
    assert statistics["spared by many heads", 16].mean == pytest.approx((1 + worst) / 2)
    assert statistics["spread over seeds", 16].mean == 16  # of 2, 18 and 34
    assert statistics["spread of one head over that of many", 16].mean == pytest.approx(1 / 16)
    assert "what stable means" in CLAIM.judge(statistics).detail
    assert len(set(CLAIM.training_configs(experiment))) == 3 * 3 * 4


def test_loss_excess_capped_at_uniform_guess(tmp_path):
    experiment = stub_experiment(tmp_path, lambda config: {"loss": 100.0 if config.recipe.seed else 2.0})
    trained = [experiment.train_or_load(experiment.make_config(seed)) for seed in (1, 0)]
    assert loss_excess(*trained) == pytest.approx(math.log(trained[0].config.spec.vocab) - 2)
