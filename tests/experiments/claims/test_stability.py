import math

import pytest

from headwise.experiments.claims.stability import CLAIM, rise
from headwise.experiments.engine.statistic import Figure, Figures
from tests.experiments.stub_experiment import told_lab

SPARED, SPREAD = "spared by many heads", "spread of one head over that of many"
CASES = {
    "holds": [(SPARED, 8, [0.5, 0.6, 0.7]), (SPARED, 32, [0.5, 0.6, 0.7]), (SPREAD, 8, Figure.known(2, 0.3, 12))],
    "depends": [(SPARED, 8, [0.5, 0.6, 0.7]), (SPARED, 32, [0.0, 0.6, 0.7])],
    "does not hold": [(SPARED, 8, [0.05, 0.06, 0.07]), (SPARED, 32, -0.4)],
}
OPEN = Figure.known(0.63, -0.64, 1.9)


@pytest.mark.parametrize(
    ("eight", "thirty_two", "on"),
    [
        (OPEN, OPEN, "on the seed: whether high rates spare 8 and 32 heads"),
        (-0.4, OPEN, "on the seed: whether high rates spare 32 heads"),
        (0.6, OPEN, "on the seed: high rates surely spare 8 heads, whether 32"),
        (0.6, -0.4, "on how many: high rates surely spare 8 of 8 and 32 heads"),
    ],
)
def test_an_open_question_is_not_answered(eight, thirty_two, on):
    verdict = CLAIM.judge(Figures().add(SPARED, 8, eight).add(SPARED, 32, thirty_two))
    assert verdict.word == "depends"
    assert verdict.on.startswith(on)


def test_a_spread_that_grows_is_told():
    figures = Figures()
    figures.add(SPARED, 8, 0.5).add(SPREAD, 8, Figure.known(0.1, 0.02, 0.6))
    assert "what stable means" in CLAIM.judge(figures).on


def test_one_head_breaks_and_many_bear_it(tmp_path):
    def tell(point):
        heads, times = point.spec.attention.heads, round(point.recipe.rate / 2e-3)
        short = point.recipe.warmup == 4
        if short and heads == 1 and times == 15:
            return {"loss": None}  # diverged
        return {"loss": 2.0 + (heads == 1 and times == 5) + (0.0 if short else heads * point.recipe.seed)}

    lab = told_lab(tmp_path, tell, (0, 1, 2))
    figures = CLAIM.measure(lab)
    worst = math.log(lab.point(0).spec.vocab) - 2
    assert figures["loss, one head", 2e-3 * 15].mean == math.inf
    assert figures["cost of high rates", 1].mean == pytest.approx((1 + worst) / 2)
    assert figures["runs lost", 1].mean == 1
    assert figures["runs lost", 4].mean == 0
    assert figures["spared by many heads", 16].mean == pytest.approx((1 + worst) / 2)
    assert figures["spread over seeds", 16].mean == 16  # of 2, 18 and 34
    assert figures["spread of one head over that of many", 16].mean == pytest.approx(1 / 16)
    assert "what stable means" in CLAIM.judge(figures).on
    assert len(set(CLAIM.points(lab))) == 3 * 3 * 4


def test_a_run_never_counts_worse_than_guessing(tmp_path):
    lab = told_lab(tmp_path, lambda point: {"loss": 100.0 if point.recipe.seed else 2.0})
    made = [lab.made(lab.point(seed)) for seed in (1, 0)]
    assert rise(*made) == pytest.approx(math.log(made[0].point.spec.vocab) - 2)
