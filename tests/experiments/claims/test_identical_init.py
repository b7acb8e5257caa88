import math

import pytest
import torch

from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests.identical_init import (
    equal_weight_fraction,
    judge,
    mean_weight_distance,
    measure,
    relative_distance,
)
from headwise.experiments.engine.statistic import StatisticTable
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.training.model_with_loss import LanguageLoss
from tests.experiments.tiny import tiny_experiment

SHARE = "share of others' distance"
CASES = {
    "holds": [(SHARE, "twins", [0.0, 0.0, 1e-6]), (SHARE, "half twins", [0.6, 0.61, 0.6])],
    "depends": [(SHARE, "twins", [0.0, 0.0, 0.0]), (SHARE, "half twins", [0.05, 0.051, 0.05])],
    "does not hold": [(SHARE, "twins", [0.7, 0.71, 0.7]), (SHARE, "half twins", [0.6, 0.61, 0.6])],
}


def test_identical_init_unmoved_twins_depends():
    verdict = judge(StatisticTable().add(SHARE, "twins", 0.0).add(SHARE, "half twins", 0.001))
    assert verdict.word == "depends"
    assert "how long" in verdict.detail


@pytest.mark.parametrize(
    ("twins", "half", "reason"),
    [
        ([0.0, 0.05, 0.01], 0.6, "whether twins drift apart"),
        ([0.05, 0.051, 0.05], 0.6, "on rounding"),
        (0.0, [0.0, 0.1, 0.3], "twins stay together"),
    ],
)
def test_identical_init_open_interval_depends(twins, half, reason):
    verdict = judge(StatisticTable().add(SHARE, "twins", twins).add(SHARE, "half twins", half))
    assert verdict.word == ("depends" if reason.startswith("on ") else "undecided")
    assert verdict.detail.startswith(reason)


def test_distance_independent_weights_is_sqrt_two():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(200, 200, generator=generator) for _ in range(2))
    assert relative_distance(first, second) == pytest.approx(math.sqrt(2), abs=0.02)
    assert relative_distance(torch.zeros(3), torch.zeros(3)) == 0


def test_layers_apart_identical_heads_stay_equal():
    # By symmetry: swapping the two heads leaves the model as it is.
    torch.manual_seed(0)
    model = Transformer(ModelSpec(vocab=11, context=16, layers=1, attention=AttentionSpec(width=12, heads=3))).double()
    (layer,) = model.attention_layers()
    with torch.no_grad():
        for matrix in "QKVO":
            getattr(layer.heads[1], f"W_{matrix}").copy_(getattr(layer.heads[0], f"W_{matrix}"))
    assert mean_weight_distance(model) == 0
    assert equal_weight_fraction(model) == 1
    ids = torch.randint(11, (2, 9))
    LanguageLoss(model)(ids[:, :-1], ids[:, 1:]).backward()
    with torch.no_grad():
        for weight in layer.parameters():
            assert weight.grad is not None
            weight -= weight.grad
    assert mean_weight_distance(model, 0, 1) < 1e-12
    assert mean_weight_distance(model, 0, 2) > 0.5


def test_identical_init_tiny_experiment_gives_statistics(tmp_path):
    statistics = measure(tiny_experiment(tmp_path))
    assert judge(statistics).word in VERDICTS
    assert statistics["twins apart", 0].mean == 0
    assert statistics["weights equal to the last bit"].mean == 1  # never trained
    assert statistics[SHARE, "half twins"].mean == 0  # of W_Q, W_K and W_V
    assert statistics["others apart", 0].mean > 1
