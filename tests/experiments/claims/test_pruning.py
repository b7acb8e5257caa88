from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from headwise.analysis.ablation.head_outputs import mean_activations
from headwise.analysis.ablation.importance import importance
from headwise.compression.curve import Curve
from headwise.compression.select_heads import heads_left
from headwise.errors import HeadwiseError
from headwise.experiments.claim import WORDS
from headwise.experiments.claims import pruning
from headwise.experiments.claims.pruning import CLAIM, MANY, can_go, keeps, more_loss, on
from headwise.experiments.engine.statistic import Figures
from headwise.model import Transformer
from tests.experiments.tiny import tiny_lab

LITTLE, SOME = (f"share that can go for less than {bar} more loss" for bar in ("1%", "5%"))
CHOSEN, BLIND = "by what they are worth", "at random"
CASES = {
    "holds": [(LITTLE, CHOSEN, [0.25, 0.25, 0.5]), (SOME, CHOSEN, [0.5, 0.5, 0.5]), (LITTLE, BLIND, [0.0, 0.1, 0.0])],
    "does not hold": [(LITTLE, CHOSEN, [0, 0, 0]), (SOME, CHOSEN, [0.1, 0.1, 0.1]), (LITTLE, BLIND, [0, 0, 0])],
    "depends": [(LITTLE, CHOSEN, [0.1, 0.1, 0.1]), (SOME, CHOSEN, [0.5, 0.5, 0.25]), (LITTLE, BLIND, [0, 0, 0])],
}


def test_what_can_go_ends_at_the_first_cut_that_costs_too_much():
    cuts = [(0.5, 0.001), (0.1, 0.002), (0.25, 0.03)]
    assert can_go(cuts, 0.01) == 0.1
    assert can_go(cuts, 0.05) == 0.5
    assert can_go(cuts, 0.001) == 0.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return tiny_lab(tmp_path_factory.mktemp("lab"))


def test_only_the_one_that_writes_matters(lab):
    model, documents = lab.made(lab.point(0)).model().double(), lab.documents()
    torch.manual_seed(0)
    with torch.no_grad():
        for head in model.heads:
            head.W_O.zero_()
        model.heads["0.1"].W_O.normal_(std=3)
    found = more_loss(model, documents, documents, cuts=(0.5, 0.1))["ablation"]
    alone = importance(model, documents, heads="0.1", means=mean_activations(model, documents))
    # If it does harm, it is the first to go, and the others change nothing; if it helps, it stays, and nothing changes.
    assert abs(alone.mean[0]) > 1e-4
    assert [more for _, more in found] == pytest.approx([min(0, alone.mean[0]) / alone.clean] * 2, rel=1e-4)
    assert [gone for gone, _ in found] == pytest.approx([1 / 8, 1 / 2])


def test_small_models_are_measured_and_judged(lab):
    figures = CLAIM.measure(lab)
    assert CLAIM.judge(figures).word in WORDS
    assert all(len(figures.at(name)) >= 4 for name in CLAIM.picture.figures)


def test_a_given_model(lab):
    model = lab.made(lab.point(0)).model()
    figures = on(model, None)
    assert figures.names == CLAIM.measure(lab).names
    assert CLAIM.judge(figures).word in WORDS


@pytest.mark.parametrize("heads", [4, 6, 7, 10, 16, 72, 270])
def test_what_the_rule_asks_for_can_be_met(heads):
    # The cut to a quarter takes a quarter or more, and not a head more than that needs.
    left = [heads_left(heads, keep) for keep in keeps(heads)]
    gone = min(heads - one for one in left if heads - one >= MANY * heads)
    assert gone == -(-heads // 4)
    if heads == 16:
        assert left == [14, 12, 8, 4]


def test_a_quarter_is_a_quarter():
    cut = SimpleNamespace(heads=12, more=SimpleNamespace(mean=0.004))
    made = cast(Curve, SimpleNamespace(of=lambda by: [cut], full=SimpleNamespace(mean=2.0)))
    assert pruning._relative(made, "ablation", 16) == [(MANY, 0.002)]


def test_one_seed_short_of_a_quarter_is_a_matter_of_seeds():
    rows = [(LITTLE, CHOSEN, [0.25, 0.125, 0.5]), (SOME, CHOSEN, [0.5, 0.5, 0.5]), (LITTLE, BLIND, [0, 0, 0])]
    figures = Figures()
    for row in rows:
        figures.add(*row)
    assert str(CLAIM.judge(figures)) == "depends: on the seed: between 12% and 50% can go"


def test_without_an_output_there_is_no_loss(lab):
    spec = lab.made(lab.point(0)).model().spec
    with pytest.raises(HeadwiseError, match="without an output"):
        more_loss(Transformer(replace(spec, output="none")), lab.documents(), None)
