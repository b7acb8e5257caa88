import math

import pytest

from headwise.experiments.claims.depth import CLAIM, GAP, MODELS, between_curves, judge, measure, three
from headwise.experiments.engine.experiment_config import Made, Point
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab, LabSize
from headwise.text.synthetic import VOCABULARY

CASES = {
    "holds": [(GAP, "at the end", [0.05, 0.06, 0.055]), (GAP, "over training", [0.04, 0.045, 0.05])],
    "does not hold": [(GAP, "at the end", [-0.05, -0.06, -0.055]), (GAP, "over training", [0.0, 0.001, -0.001])],
    "depends": [(GAP, "at the end", [0.05, 0.06, 0.055]), (GAP, "over training", [-0.04, -0.05, -0.045])],
}


def test_the_area_between_two_lines():
    # 0 at the first step and 1 at the last, in a straight line: half.
    assert between_curves({0: 1.0, 10: 1.5, 20: 2.0}, {0: 1.0, 10: 1.0, 20: 1.0}) == (1.0, 0.5)
    assert between_curves({0: 1.0, 30: 1.0, 40: 2.0}, {0: 1.0, 30: 1.0, 40: 1.0})[1] == pytest.approx(1 / 8)
    assert between_curves({5: 3.0}, {5: 1.0}) == (2.0, 2.0)


def test_three_models_that_differ_in_one_thing_each(tmp_path):
    full, fewer_layers, fewer_heads = three(Lab(Store(tmp_path)), 1).values()
    assert [p.spec.layers for p in (full, fewer_layers, fewer_heads)] == [6, 5, 6]
    assert [p.spec.attention.heads for p in (full, fewer_layers, fewer_heads)] == [8, 8, 4]
    assert full.recipe == fewer_layers.recipe == fewer_heads.recipe
    assert full.recipe.steps == 1200


class Told(Lab):
    """Of every model: a loss of 4 that falls by a nat a step with all there is, by half of it with less."""

    def made(self, point: Point) -> Made:
        less = {name for name, one in three(self, point.recipe.seed).items() if one == point} - {"full"}
        curve = [(step, 4 - step / (2 if less else 1)) for step in range(1, point.recipe.steps + 1)]
        return Made(point, self.store.folder, {"loss": curve[-1][1], "curve": [] if self.size.rate > 1 else curve})


def test_curves_are_compared_seed_by_seed(tmp_path):
    lab = Told(Store(tmp_path), (0, 1), LabSize(width=16, heads=4, steps=5))  # 3 steps for these
    figures = measure(lab)
    assert [[figures[name, step].mean for step in (1, 2, 3)] for name in MODELS] == [[3, 2, 1], *[[3.5, 3, 2.5]] * 2]
    assert figures["nats above the full model, at the end", "fewer heads"].values == (1.5, 1.5)
    assert figures["nats above the full model, over training", "fewer layers"].mean == 1
    assert figures[GAP, "at the end"].mean == figures[GAP, "over training"].mean == 0
    assert judge(figures).word == "does not hold"
    assert set(CLAIM.points(lab)) == {point for seed in (0, 1) for point in three(lab, seed).values()}


def test_a_run_that_diverged_knows_as_much_as_a_guess(tmp_path):
    lab = Told(Store(tmp_path), (0,), LabSize(width=16, heads=4, steps=5, rate=2.0))
    assert measure(lab)["fewer heads", 3].mean == math.log(len(VOCABULARY))
