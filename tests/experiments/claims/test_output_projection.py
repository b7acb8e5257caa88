import pytest

from headwise.experiments.claims.output_projection import CLAIM, STARTS
from headwise.experiments.engine.statistic import Figures
from tests.experiments.stub_experiment import told_lab

CASES = {
    "holds": [("lost", "frozen random", [0.05, 0.06, 0.055]), ("lost", "identity", [0.1, 0.11, 0.12])],
    "depends": [("lost", "frozen random", [0.0, 0.005, -0.005]), ("lost", "identity", [0.1, 0.11, 0.12])],
    "does not hold": [("lost", "frozen random", [0.0, 0.005, -0.005]), ("lost", "identity", -0.1)],
}


def test_costs_are_paired_by_seed(tmp_path):
    above = dict(zip(STARTS.values(), (0.0, 0.25, 0.5), strict=True))
    lab = told_lab(
        tmp_path, lambda p: {"loss": 2 * p.recipe.seed + above[p.start], "marks": {"surname": above[p.start]}}, (1, 2)
    )
    figures = CLAIM.measure(lab)
    assert figures["loss", "learned"].values == (2, 4)
    assert figures["lost", "frozen random"].values == pytest.approx((0.25, 0.25))
    assert figures["lost", "identity"].values == pytest.approx((0.5, 0.5))
    assert figures["right, identity", "surname"].mean == 0.5
    assert CLAIM.judge(figures).word == "holds"
    assert set(CLAIM.points(lab)) >= {lab.point(1), lab.point(2, start="identity W_O")}


def test_what_is_unsure_is_told():
    figures = Figures().add("lost", "frozen random", [0.0, 0.1, 0.05]).add("lost", "identity", 0.1)
    assert CLAIM.judge(figures).on == "on the seed: identity costs; frozen random may cost, or not"
