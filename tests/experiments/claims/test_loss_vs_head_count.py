import pytest

from headwise.experiments.claims.loss_vs_head_count import CLAIM, behind_the_best
from headwise.experiments.engine.statistic import Figures
from tests.experiments.stub_experiment import told_lab


def rows(*values):
    return [("behind the best", 2**n, [value - 0.002, value, value + 0.002]) for n, value in enumerate(values)]


CASES = {
    "holds": rows(0.07, 0.03, 0.0, 0.01, 0.02, 0.05),
    "depends": rows(0.07, 0.03, 0.0, 0.01, 0.02, 0.0),
    "does not hold": rows(-0.01, 0.01, 0.0, 0.01, 0.01, 0.0),
}


def test_a_peak_is_no_broad_top():
    figures = Figures()
    for row in rows(0.07, 0.05, 0.0, 0.05, 0.04, 0.09):
        figures.add(*row)
    assert "narrow" in CLAIM.judge(figures).on


@pytest.mark.parametrize(
    ("one", "most", "word", "on"),
    [
        ([0.02, 0.05, 0.26], [0.05, 0.1, 0.42], "depends", "whether one head or heads of one channel"),
        ([0.2, 0.21, 0.2], [0.05, 0.1, 0.42], "depends", "whether heads of one channel is worse"),
        ([-0.02, -0.021, -0.02], [0.05, 0.1, 0.42], "depends", "on the seed"),
        ([-0.02, -0.021, -0.02], [0.2, 0.21, 0.2], "depends", "on the end: one head is no worse"),
        ([-0.02, -0.021, -0.02], [0.0, 0.001, 0.0], "does not hold", "neither end"),
        ([0.009], [0.009], "does not hold", "neither end"),
    ],
)
def test_an_open_question_is_not_answered(one, most, word, on):
    figures = Figures().add("behind the best", 1, one).add("behind the best", 64, most)
    verdict = CLAIM.judge(figures.add("behind the best", 8, 0.0))
    assert verdict.word == word
    assert on in verdict.on


def test_differences_are_paired_and_an_end_is_never_the_best():
    made = behind_the_best({1: [1.0, 1.1], 2: [1.5, 1.7], 4: [1.6, 1.9], 8: [2.0, 2.0]})
    assert made[1] == pytest.approx([-0.5, -0.6])
    assert made[2] == [0, 0]
    assert made[8] == pytest.approx([0.5, 0.3])


def test_a_hill_that_is_told_is_found(tmp_path):
    heights = {1: 2.6, 2: 2.41, 4: 2.4, 8: 2.415, 16: 2.5}
    lab = told_lab(tmp_path, lambda p: {"loss": heights[p.spec.attention.heads] + p.recipe.seed}, (0, 1))
    figures = CLAIM.measure(lab)
    assert figures["loss", 16].values == (2.5, 3.5)
    assert figures["behind the best", 1].values == pytest.approx((0.2, 0.2))
    assert figures["published perplexity", 8].mean == 4.92
    assert str(CLAIM.judge(figures)) == "holds: within 0.02 nats from the best lie 2, 4, 8 heads"
    assert set(CLAIM.points(lab)) >= {lab.point(0), lab.point(1, 1)}
