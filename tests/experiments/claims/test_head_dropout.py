from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headwise.experiments.claim import WORDS
from headwise.experiments.claims import head_dropout
from headwise.experiments.claims.head_dropout import CLAIM, RATE, Reliance, gini, judge, measure, reliance
from headwise.experiments.engine.statistic import Figures
from headwise.model import Transformer
from headwise.spec import preset
from tests.experiments.tiny import tiny_lab

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


def test_a_price_is_told_and_a_wide_interval_is_no_proof():
    figures = Figures()
    for name, at, values in CASES["holds"]:
        figures.add(name, at, values)
    assert "4.7% more loss" in judge(figures).on
    figures.add(WORST, None, [0.1, 0.1, 0.9])
    assert str(judge(figures)) == "depends: on the seed: whether the worst head costs less stays open"


@pytest.mark.parametrize(
    ("worst", "uneven", "on"),
    [
        ([0.7, 0.9, 1.2], [0.04, 0.1, 0.05], "on the seed: whether the worst head costs less stays open"),
        ([0.7, 0.9, 1.2], [-0.1, 0.1, 0.0], "on the seed: whether the worst head costs less and heads are needed more"),
        (0.5, 0.0, "on what is meant: the worst head costs less"),
        (1.0, -0.2, "on what is meant: heads are needed more evenly"),
    ],
)
def test_an_open_question_is_not_answered(worst, uneven, on):
    verdict = judge(Figures().add(WORST, None, worst).add(GINI, None, uneven).add(LOSS, None, 1.0))
    assert verdict.word == "depends"
    assert verdict.on.startswith(on)


@pytest.mark.parametrize(
    ("values", "expected"),
    # Sorted, n values: Gini = Σ (2i − n − 1)·x_i / (n·Σx).
    [([1, 1, 1, 1], 0.0), ([0, 0, 0, 1], 3 / 4), ([1, 2, 3], (-2 * 1 + 2 * 3) / (3 * 6)), ([0, 0], 0.0)],
)
def test_the_gini_index(values, expected):
    assert gini(np.array(values, dtype=float)) == pytest.approx(expected)


def test_what_is_told_of_the_cost_of_heads(monkeypatch):
    lost = np.array([0.3, -0.1, 0.1, 0.0])
    monkeypatch.setattr(head_dropout, "importance", lambda *_, how: SimpleNamespace(mean=lost))
    found = reliance(Transformer(preset("nano")), "a text")
    # Of 0, 0, .1 and .3 a Gini index of (1·.1 + 3·.3) / (4·.4).
    assert (found.worst, found.mean, found.top) == pytest.approx((0.3, 0.075, 0.75))
    assert found.gini == pytest.approx(1 / 1.6)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return tiny_lab(tmp_path_factory.mktemp("lab"))


def test_heads_that_write_nothing_cost_nothing(lab):
    model, documents = lab.made(lab.point(0)).model(), lab.documents()
    with torch.no_grad():
        for head in model.heads:
            head.W_O.zero_()
    assert reliance(model, documents) == Reliance(0, 0, 0, 0)


def test_both_models_are_measured_and_judged(lab):
    figures = measure(lab)
    assert judge(figures).word in WORDS
    for name in CLAIM.picture.figures:
        assert list(figures.at(name)) == ["without", "with head dropout"]
    rates = [point.spec.attention.head_dropout for point in CLAIM.points(lab)]
    assert rates == [0, RATE]
    assert CLAIM.on is None
