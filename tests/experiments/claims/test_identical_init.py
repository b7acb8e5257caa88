import math

import pytest
import torch

from headwise.experiments.claim import WORDS
from headwise.experiments.claims.identical_init import distance, judge, layers_apart, measure, same_bits
from headwise.experiments.engine.statistic import Figures
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.training.loss import LanguageLoss
from tests.experiments.tiny import tiny_lab

SHARE = "share of others' distance"
CASES = {
    "holds": [(SHARE, "twins", [0.0, 0.0, 1e-6]), (SHARE, "half twins", [0.6, 0.61, 0.6])],
    "depends": [(SHARE, "twins", [0.0, 0.05, 0.01]), (SHARE, "half twins", [0.6, 0.61, 0.6])],
    "does not hold": [(SHARE, "twins", [0.7, 0.71, 0.7]), (SHARE, "half twins", [0.6, 0.61, 0.6])],
}


def test_twins_that_never_moved_say_nothing():
    verdict = judge(Figures().add(SHARE, "twins", 0.0).add(SHARE, "half twins", 0.001))
    assert verdict.word == "depends"
    assert "how long" in verdict.on


@pytest.mark.parametrize(
    ("twins", "half", "on"),
    [
        ([0.0, 0.05, 0.01], 0.6, "on the seed: whether twins drift apart"),
        ([0.05, 0.051, 0.05], 0.6, "on rounding"),
        (0.0, [0.0, 0.1, 0.3], "on the seed: twins stay together"),
    ],
)
def test_an_open_question_is_not_answered(twins, half, on):
    verdict = judge(Figures().add(SHARE, "twins", twins).add(SHARE, "half twins", half))
    assert verdict.word == "depends"
    assert verdict.on.startswith(on)


def test_independent_weights_are_a_root_of_two_apart():
    dice = torch.Generator().manual_seed(0)
    one, other = (torch.randn(200, 200, generator=dice) for _ in range(2))
    assert distance(one, other) == pytest.approx(math.sqrt(2), abs=0.02)
    assert distance(torch.zeros(3), torch.zeros(3)) == 0


def test_heads_born_equal_get_the_same_gradient():
    # By symmetry: swapping the two heads leaves the model as it is.
    torch.manual_seed(0)
    model = Transformer(ModelSpec(vocab=11, context=16, layers=1, attention=AttentionSpec(width=12, heads=3))).double()
    (layer,) = model.attention_layers()
    with torch.no_grad():
        for letter in "QKVO":
            getattr(layer.heads[1], f"W_{letter}").copy_(getattr(layer.heads[0], f"W_{letter}"))
    assert layers_apart(model) == 0
    assert same_bits(model) == 1
    ids = torch.randint(11, (2, 9))
    LanguageLoss(model)(ids[:, :-1], ids[:, 1:]).backward()
    with torch.no_grad():
        for weight in layer.parameters():
            assert weight.grad is not None
            weight -= weight.grad
    assert layers_apart(model, 0, 1) < 1e-12
    assert layers_apart(model, 0, 2) > 0.5


def test_figures_of_the_lab(tmp_path):
    figures = measure(tiny_lab(tmp_path))
    assert judge(figures).word in WORDS
    assert figures["twins apart", 0].mean == 0
    assert figures["weights equal to the last bit"].mean == 1  # never trained
    assert figures[SHARE, "half twins"].mean == 0  # of what they read
    assert figures["others apart", 0].mean > 1
