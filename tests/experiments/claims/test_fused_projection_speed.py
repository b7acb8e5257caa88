import pytest
import torch

from headwise.experiments.claim_tests.fused_projection_speed import (
    CLAIM,
    LoopedHeads,
    loop_slowdowns,
    measure,
    measure_model,
)
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.trained_model_provider import TrainedModelProvider
from headwise.heads import MultiHeadAttention
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec


def rows(small, large):
    return [
        (f"projections {pass_name}", size, Statistic.with_interval(ratio, 0.9 * ratio, 1.1 * ratio))
        for pass_name in ("forward", "with backward")
        for size, ratio in (("64x8x64", small), ("768x12x512", large))
    ]


CASES = {"holds": rows(5.0, 2.0), "depends": rows(5.0, 1.2), "does not hold": rows(1.0, 1.2)}


@pytest.mark.parametrize(
    ("small", "large", "reason"),
    [
        (5.0, 1.2, "on the size (width x heads x tokens); not so: 768x12x512 forward, 768x12x512 with backward"),
        (5.0, 1.6, "open: 768x12x512 forward, 768x12x512 with backward"),
        (1.0, 1.6, "not so: 64x8x64 forward, 64x8x64 with backward; open: 768x12x512"),
    ],
)
def test_one_projection_open_interval_depends(small, large, reason):
    statistics = StatisticTable()
    for row in rows(small, large):
        statistics.add(*row)
    assert CLAIM.correct_and_judge(statistics)[1].detail.startswith(reason)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_looped_heads_equal_layer(kv_heads):
    layer = MultiHeadAttention(width=30, heads=6, kv_heads=kv_heads).double()
    x = torch.randn(2, 7, 30, dtype=torch.float64)
    loop = LoopedHeads(layer)
    torch.testing.assert_close(loop(x), layer(x))
    q, k, v = layer.qkv(x)
    for projected, expected in zip(loop.project(x), [*q.unbind(1), *k.unbind(1), *v.unbind(1)], strict=True):
        torch.testing.assert_close(projected, expected)
    assert sum(p.numel() for p in loop.parameters()) == sum(p.numel() for p in layer.parameters())


def test_loop_slowdown_many_heads_is_slower():
    ratios = loop_slowdowns(AttentionSpec(width=64, heads=64), 8, rounds=5, min_seconds=0.002)
    assert ratios["projections forward"].mean > 3  # 192 calls against one


def test_one_projection_small_experiment_gives_verdict(tmp_path):
    statistics = measure(TrainedModelProvider(ExperimentStore(tmp_path)), ((16, 4, 3), (24, 3, 5)), rounds=3)
    assert list(statistics.by_condition("layer forward")) == ["16x4x3", "24x3x5"]
    assert CLAIM.judge(statistics)


def test_one_projection_given_model_gives_verdict():
    model = Transformer(
        ModelSpec(vocab=11, context=16, layers=1, attention=AttentionSpec(width=12, heads=4, kv_heads=2))
    )
    statistics = measure_model(model, rounds=3)
    assert list(statistics.by_condition("projections forward")) == ["12x4x1", "12x4x16"]
    assert CLAIM.judge(statistics)
