import math

import pytest

import headwise as hw
from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests.heads_differ import CLAIM, head_differences, judge, measure, measure_model
from headwise.experiments.compared_head_counts import fit_log2_slopes
from headwise.experiments.engine.statistic import StatisticTable
from tests.attached.test_analysis import build, documents
from tests.experiments.tiny import copy_first_head, tiny_experiment

GAINED, OVERLAP, SLOPE = (
    "maps apart, gained in training",
    "spaces alike beyond chance",
    "maps apart, gained by a doubling of heads",
)
CASES = {
    "holds": [
        (GAINED, None, [0.2, 0.21, 0.2]),
        (OVERLAP, "trained", [0.0, 0.001, 0.0]),
        (SLOPE, None, [0.03, 0.031, 0.03]),
    ],
    "depends": [
        (GAINED, None, [0.2, 0.21, 0.2]),
        (OVERLAP, "trained", [0.2, 0.2, 0.21]),
        (SLOPE, None, [0.0, 0.03, -0.02]),
    ],
    "does not hold": [(GAINED, None, [0.01, 0.012, 0.01]), (OVERLAP, "trained", [0.0, 0.0, 0.0])],
}


def test_heads_differ_given_model_ignores_head_dim():
    verdict = judge(StatisticTable().add(GAINED, None, 0.3).add(OVERLAP, "trained", 0.0))
    assert str(verdict) == "holds: head_dim was not compared"


@pytest.mark.parametrize(
    ("gained", "overlap", "slope", "reason"),
    [
        ([0.0, 0.05, 0.1], 0.0, 0.03, "the distance of maps"),
        (0.3, [0.0, 0.05, 0.1], 0.03, "their maps diverge, but whether their subspaces overlap"),
        (0.3, 0.0, [0.0, 0.03, -0.02], "their maps diverge, but whether narrower heads differ more"),
        (0.3, 0.0, 0.0, "on the comparison: their maps diverge, but narrower heads differ no more"),
        (0.3, 0.2, [0.0, 0.03, -0.02], "on the comparison: their maps diverge, but their subspaces overlap"),
    ],
)
def test_heads_differ_open_interval_depends(gained, overlap, slope, reason):
    verdict = judge(StatisticTable().add(GAINED, None, gained).add(OVERLAP, "trained", overlap).add(SLOPE, None, slope))
    assert verdict.word == ("depends" if reason.startswith("on ") else "undecided")
    assert verdict.detail.startswith(reason)


def test_differences_identical_heads_are_zero(tmp_path):
    experiment = tiny_experiment(tmp_path)
    model = experiment.train_or_load(experiment.make_config(0)).load_model()
    copy_first_head(model)
    result = head_differences(model, experiment.held_out_corpus(), rows=64)
    assert result["maps"] == pytest.approx(0, abs=1e-6)
    assert result["spaces"] == pytest.approx(1, abs=1e-5)


def test_differences_random_subspaces_overlap_at_chance(tmp_path):
    experiment = tiny_experiment(tmp_path)
    overlaps = [
        head_differences(
            experiment.train_or_load(experiment.make_config(seed)).load_model(0), experiment.held_out_corpus(), rows=64
        )["spaces"]
        for seed in range(3)
    ]
    # 6 pairs, 2 layers, 4 spaces each; and centring takes a dimension
    assert sum(overlaps) / 3 == pytest.approx(0, abs=0.08)


def test_log2_slopes_known_values():
    assert fit_log2_slopes({2: [1.0, 0.0], 8: [3.0, 0.0], 32: [5.0, 0.0]}) == [1.0, 0.0]


def test_heads_differ_tiny_experiment_gives_statistics(tmp_path):
    experiment = tiny_experiment(tmp_path, seeds=(0, 1))
    statistics = measure(experiment)
    assert judge(statistics).word in VERDICTS
    assert list(statistics.by_condition("maps apart, by heads")) == [2, 4, 8, 16]
    change = [
        after - before
        for before, after in zip(
            statistics["maps apart", "untrained"].values, statistics["maps apart", "trained"].values, strict=True
        )
    ]
    assert statistics[GAINED].values == pytest.approx(change)
    assert 0 <= statistics["maps apart", "trained"].mean <= math.log(2)


def test_heads_differ_given_model_gives_verdict(tmp_path):
    experiment = tiny_experiment(tmp_path)
    statistics = measure_model(
        experiment.train_or_load(experiment.make_config(0)).load_model(), experiment.held_out_corpus()
    )
    assert judge(statistics).word in VERDICTS
    assert set(statistics.names) & set(CLAIM.plot.statistics)


def test_heads_differ_attached_model_gives_verdict():
    model = hw.attach(*build("gpt2"))
    assert judge(measure_model(model, documents(24))).word in VERDICTS
