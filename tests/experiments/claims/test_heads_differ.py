import math

import pytest

import headwise as hw
from headwise.experiments.claim import WORDS
from headwise.experiments.claims.heads_differ import CLAIM, differences, judge, measure, on
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.head_counts import trends
from tests.attached.test_analysis import build, documents
from tests.experiments.tiny import make_copies, tiny_lab

GAINED, ALIKE, SLOPE = (
    "maps apart, gained in training",
    "spaces alike beyond chance",
    "maps apart, gained by a doubling of heads",
)
CASES = {
    "holds": [
        (GAINED, None, [0.2, 0.21, 0.2]),
        (ALIKE, "trained", [0.0, 0.001, 0.0]),
        (SLOPE, None, [0.03, 0.031, 0.03]),
    ],
    "depends": [
        (GAINED, None, [0.2, 0.21, 0.2]),
        (ALIKE, "trained", [0.2, 0.2, 0.21]),
        (SLOPE, None, [0.0, 0.03, -0.02]),
    ],
    "does not hold": [(GAINED, None, [0.01, 0.012, 0.01]), (ALIKE, "trained", [0.0, 0.0, 0.0])],
}


def test_a_given_model_is_judged_without_head_counts():
    verdict = judge(Figures().add(GAINED, None, 0.3).add(ALIKE, "trained", 0.0))
    assert str(verdict) == "holds: head_dim was not compared"


@pytest.mark.parametrize(
    ("gained", "alike", "slope", "on"),
    [
        ([0.0, 0.05, 0.1], 0.0, 0.03, "on the seed: how far maps part"),
        (0.3, [0.0, 0.05, 0.1], 0.03, "on the seed: their maps part, but whether their subspaces overlap"),
        (0.3, 0.0, [0.0, 0.03, -0.02], "on the seed: their maps part, but whether narrower heads differ more"),
        (0.3, 0.0, 0.0, "on what is compared: their maps part, but narrower heads differ no more"),
        (0.3, 0.2, [0.0, 0.03, -0.02], "on what is compared: their maps part, but their subspaces overlap"),
    ],
)
def test_an_open_question_is_not_answered(gained, alike, slope, on):
    verdict = judge(Figures().add(GAINED, None, gained).add(ALIKE, "trained", alike).add(SLOPE, None, slope))
    assert verdict.word == "depends"
    assert verdict.on.startswith(on)


def test_copies_are_not_apart(tmp_path):
    lab = tiny_lab(tmp_path)
    model = lab.made(lab.point(0)).model()
    make_copies(model)
    found = differences(model, lab.documents(), rows=64)
    assert found["maps"] == pytest.approx(0, abs=1e-6)
    assert found["spaces"] == pytest.approx(1, abs=1e-5)


def test_random_subspaces_overlap_by_chance(tmp_path):
    lab = tiny_lab(tmp_path)
    found = [differences(lab.made(lab.point(seed)).model(0), lab.documents(), rows=64)["spaces"] for seed in range(3)]
    assert sum(found) / 3 == pytest.approx(
        0, abs=0.08
    )  # 6 pairs, 2 layers, 4 spaces each; and centring takes a dimension


def test_trends():
    assert trends({2: [1.0, 0.0], 8: [3.0, 0.0], 32: [5.0, 0.0]}) == [1.0, 0.0]


def test_figures_of_the_lab(tmp_path):
    lab = tiny_lab(tmp_path, seeds=(0, 1))
    figures = measure(lab)
    assert judge(figures).word in WORDS
    assert list(figures.at("maps apart, by heads")) == [2, 4, 8, 16]
    change = [
        after - before
        for before, after in zip(
            figures["maps apart", "untrained"].values, figures["maps apart", "trained"].values, strict=True
        )
    ]
    assert figures[GAINED].values == pytest.approx(change)
    assert 0 <= figures["maps apart", "trained"].mean <= math.log(2)


def test_on_a_given_model(tmp_path):
    lab = tiny_lab(tmp_path)
    figures = on(lab.made(lab.point(0)).model(), lab.documents())
    assert judge(figures).word in WORDS
    assert set(figures.names) & set(CLAIM.picture.figures)


def test_on_an_attached_model():
    model = hw.attach(*build("gpt2"))
    assert judge(on(model, documents(24))).word in WORDS
