import pytest

from headwise.experiments.claims.map_memory import CLAIM, exponent, measure, memory, on
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab, LabSize
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec


def rows(batched, blockwise, fused):
    return [("exponent", "batched", batched), ("exponent", "blockwise", blockwise), ("exponent", "fused", fused)]


CASES = {"holds": rows(2.0, 0.6, 1.0), "depends": rows(2.0, 0.6, 1.9), "does not hold": rows(1.2, 0.6, 1.0)}


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_power_of_a_power(power):
    assert exponent({n: 7 * n**power for n in (10, 100, 700)}) == pytest.approx(power)


def test_maps_are_held():
    # One map of 4 heads, 1024² numbers of four bytes, is 16 MB; the backward pass needs a few of them.
    maps = memory("batched", 1024, 4, 8, batch=1)
    assert 32 < maps < 16 * 8
    assert memory("fused", 1024, 4, 8, batch=1) < 16


@pytest.mark.slow
def test_it_measures_and_judges(tmp_path):
    found = measure(Lab(Store(tmp_path), size=LabSize(width=16, heads=4)), (64, 512))
    assert list(found.at("batched")) == [64, 512]
    assert CLAIM.judge(found)


@pytest.mark.slow
def test_on_a_model():
    model = Transformer(ModelSpec(vocab=11, context=16, layers=1, attention=AttentionSpec(width=16, heads=2)))
    assert CLAIM.judge(on(model, None, (128, 512)))
