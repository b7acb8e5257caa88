import pytest

from headwise.experiments.claim_tests.loss_vs_head_count import CLAIM, gap_to_best_middle_count
from headwise.experiments.engine.statistic import StatisticTable
from tests.experiments.stub_experiment import stub_experiment


def rows(*values):
    return [("behind the best", 2**n, [value - 0.002, value, value + 0.002]) for n, value in enumerate(values)]


CASES = {
    "holds": rows(0.07, 0.03, 0.0, 0.01, 0.02, 0.05),
    "depends": rows(0.07, 0.03, 0.0, 0.01, 0.02, 0.0),
    "does not hold": rows(-0.01, 0.01, 0.0, 0.01, 0.01, 0.0),
}


def test_loss_vs_head_count_narrow_peak_depends():
    statistics = StatisticTable()
    for row in rows(0.07, 0.05, 0.0, 0.05, 0.04, 0.09):
        statistics.add(*row)
    assert "narrow" in CLAIM.judge(statistics).detail


@pytest.mark.parametrize(
    ("one_head", "max_heads", "word", "reason"),
    [
        ([0.02, 0.05, 0.26], [0.05, 0.1, 0.42], "undecided", "whether one head or heads of one channel"),
        ([0.2, 0.21, 0.2], [0.05, 0.1, 0.42], "undecided", "whether heads of one channel is worse"),
        ([-0.02, -0.021, -0.02], [0.05, 0.1, 0.42], "undecided", ""),
        ([-0.02, -0.021, -0.02], [0.2, 0.21, 0.2], "depends", "on the end: one head is not worse"),
        ([-0.02, -0.021, -0.02], [0.0, 0.001, 0.0], "does not hold", "neither end"),
        ([0.009], [0.009], "does not hold", "neither end"),
    ],
)
def test_loss_vs_head_count_open_interval_depends(one_head, max_heads, word, reason):
    statistics = StatisticTable().add("behind the best", 1, one_head).add("behind the best", 64, max_heads)
    verdict = CLAIM.judge(statistics.add("behind the best", 8, 0.0))
    assert verdict.word == word
    assert reason in verdict.detail


def test_behind_the_best_is_paired_and_excludes_ends():
    gaps = gap_to_best_middle_count({1: [1.0, 1.1], 2: [1.5, 1.7], 4: [1.6, 1.9], 8: [2.0, 2.0]})
    assert gaps[1] == pytest.approx([-0.5, -0.6])
    assert gaps[2] == [0, 0]
    assert gaps[8] == pytest.approx([0.5, 0.3])


def test_loss_vs_head_count_stub_losses_hold(tmp_path):
    losses = {1: 2.6, 2: 2.41, 4: 2.4, 8: 2.415, 16: 2.5}
    experiment = stub_experiment(tmp_path, lambda p: {"loss": losses[p.spec.attention.heads] + p.recipe.seed}, (0, 1))
    statistics = CLAIM.measure(experiment)
    assert statistics["loss", 16].values == (2.5, 3.5)
    assert statistics["behind the best", 1].values == pytest.approx((0.2, 0.2))
    assert statistics["published perplexity", 8].mean == 4.92
    assert str(CLAIM.judge(statistics)) == "holds: within 0.02 nats from the best lie 2, 4, 8 heads"
    assert set(CLAIM.training_configs(experiment)) >= {experiment.make_config(0), experiment.make_config(1, 1)}
