import pytest
import torch

from headwise.experiments.claims.one_projection import CLAIM, LoopedHeads, measure, on, slower
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab
from headwise.heads import MultiHeadAttention
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec


def rows(small, large):
    return [
        (f"projections {which}", size, Figure.known(ratio, 0.9 * ratio, 1.1 * ratio))
        for which in ("forward", "with backward")
        for size, ratio in (("64x8x64", small), ("768x12x512", large))
    ]


CASES = {"holds": rows(5.0, 2.0), "depends": rows(5.0, 1.2), "does not hold": rows(1.0, 1.2)}


@pytest.mark.parametrize(
    ("small", "large", "on"),
    [
        (5.0, 1.2, "on the size (width x heads x tokens); not so: 768x12x512 forward, 768x12x512 with backward"),
        (5.0, 1.6, "on the turn of the clock; open: 768x12x512 forward, 768x12x512 with backward"),
        (1.0, 1.6, "on the turn of the clock; not so: 64x8x64 forward, 64x8x64 with backward; open: 768x12x512"),
    ],
)
def test_an_open_question_is_not_answered(small, large, on):
    figures = Figures()
    for row in rows(small, large):
        figures.add(*row)
    assert CLAIM.decide(figures)[1].on.startswith(on)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_the_loop_is_the_same_layer(kv_heads):
    layer = MultiHeadAttention(width=30, heads=6, kv_heads=kv_heads).double()
    x = torch.randn(2, 7, 30, dtype=torch.float64)
    loop = LoopedHeads(layer)
    torch.testing.assert_close(loop(x), layer(x))
    q, k, v = layer.read(x)
    for got, want in zip(loop.project(x), [*q.unbind(1), *k.unbind(1), *v.unbind(1)], strict=True):
        torch.testing.assert_close(got, want)
    assert sum(p.numel() for p in loop.parameters()) == sum(p.numel() for p in layer.parameters())


def test_a_loop_over_very_many_heads_is_slower():
    made = slower(AttentionSpec(width=64, heads=64), 8, turns=5, least=0.002)
    assert made["projections forward"].mean > 3  # 192 calls against one


def test_it_measures_and_judges(tmp_path):
    found = measure(Lab(Store(tmp_path)), ((16, 4, 3), (24, 3, 5)), turns=3)
    assert list(found.at("layer forward")) == ["16x4x3", "24x3x5"]
    assert CLAIM.judge(found)


def test_on_a_model():
    model = Transformer(
        ModelSpec(vocab=11, context=16, layers=1, attention=AttentionSpec(width=12, heads=4, kv_heads=2))
    )
    found = on(model, turns=3)
    assert list(found.at("projections forward")) == ["12x4x1", "12x4x16"]
    assert CLAIM.judge(found)
