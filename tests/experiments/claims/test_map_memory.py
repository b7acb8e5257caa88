import pytest

from headwise.experiments.claim_tests.map_memory import CLAIM, attention_memory, growth_exponent, measure, measure_model
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.trained_model_provider import ExperimentSize, TrainedModelProvider
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec


def rows(batched, blockwise, fused):
    return [("exponent", "batched", batched), ("exponent", "blockwise", blockwise), ("exponent", "fused", fused)]


CASES = {"holds": rows(2.0, 0.6, 1.0), "depends": rows(2.0, 0.6, 1.9), "does not hold": rows(1.2, 0.6, 1.0)}


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_exponent_of_power_law(power):
    assert growth_exponent({n: 7 * n**power for n in (10, 100, 700)}) == pytest.approx(power)


def test_memory_batched_holds_maps_fused_does_not():
    # One map of 4 heads, 1024² numbers of four bytes, is 16 MB; the backward pass needs a few of them.
    maps = attention_memory("batched", 1024, 4, 8, batch_size=1)
    assert 32 < maps < 16 * 8
    assert attention_memory("fused", 1024, 4, 8, batch_size=1) < 16


@pytest.mark.slow
def test_map_memory_small_experiment_gives_verdict(tmp_path):
    statistics = measure(
        TrainedModelProvider(ExperimentStore(tmp_path), size=ExperimentSize(width=16, heads=4)), (64, 512)
    )
    assert list(statistics.by_condition("batched")) == [64, 512]
    assert CLAIM.judge(statistics)


@pytest.mark.slow
def test_map_memory_given_model_gives_verdict():
    model = Transformer(ModelSpec(vocab=11, context=16, layers=1, attention=AttentionSpec(width=16, heads=2)))
    assert CLAIM.judge(measure_model(model, None, (128, 512)))
