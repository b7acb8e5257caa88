import pytest

from headwise.experiments.claim_tests.output_projection_needed import CLAIM, INITS
from headwise.experiments.engine.statistic import StatisticTable
from tests.experiments.stub_experiment import stub_experiment

CASES = {
    "holds": [("lost", "frozen random", [0.05, 0.06, 0.055]), ("lost", "identity", [0.1, 0.11, 0.12])],
    "depends": [("lost", "frozen random", [0.0, 0.005, -0.005]), ("lost", "identity", [0.1, 0.11, 0.12])],
    "does not hold": [("lost", "frozen random", [0.0, 0.005, -0.005]), ("lost", "identity", -0.1)],
}


def test_output_projection_costs_are_paired_by_seed(tmp_path):
    increase_by_init = dict(zip(INITS.values(), (0.0, 0.25, 0.5), strict=True))
    experiment = stub_experiment(
        tmp_path,
        lambda p: {
            "loss": 2 * p.recipe.seed + increase_by_init[p.init],
            "probe_accuracy": {"surname": increase_by_init[p.init]},
        },
        (1, 2),
    )
    statistics = CLAIM.measure(experiment)
    assert statistics["loss", "learned"].values == (2, 4)
    assert statistics["lost", "frozen random"].values == pytest.approx((0.25, 0.25))
    assert statistics["lost", "identity"].values == pytest.approx((0.5, 0.5))
    assert statistics["right, identity", "surname"].mean == 0.5
    assert CLAIM.judge(statistics).word == "holds"
    assert set(CLAIM.training_configs(experiment)) >= {
        experiment.make_config(1),
        experiment.make_config(2, init="identity W_O"),
    }


def test_output_projection_open_interval_depends():
    statistics = StatisticTable().add("lost", "frozen random", [0.0, 0.1, 0.05]).add("lost", "identity", 0.1)
    assert CLAIM.judge(statistics).detail == "identity costs; frozen random may cost, or not"
