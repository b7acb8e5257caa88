import pytest

from headwise.errors import HeadwiseError
from headwise.experiments.claim_tests.head_count_bandwidth import (
    CLAIM,
    measure,
    relative_times,
    time_layers_of_model_width,
)
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.trained_model_provider import ExperimentSize, TrainedModelProvider
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec


def rows(one_head, max_heads):
    return [
        (name, position, v)
        for name in ("batched forward", "fused forward")
        for position, v in ((1, one_head), (8, 1.0), (64, max_heads))
    ]


CASES = {"holds": rows(0.7, 2.0), "depends": rows(1.0, 2.0), "does not hold": rows(0.9, 1.05)}


def test_bandwidth_noisy_timing_depends():
    statistics = StatisticTable()
    for name, position, _ in rows(1, 1):
        statistics.add(name, position, Statistic.median_of([1.0, 1.2] * 8))
    assert CLAIM.correct_and_judge(statistics)[1].detail.startswith("whether 64 heads")


def test_relative_times_more_heads_take_longer():
    times_by_heads = relative_times(64, 128, (8, 64), backend="batched", rounds=5)
    assert times_by_heads[8].mean == 1
    assert times_by_heads[64].mean > 1.2  # eight times as many exponentials


def test_relative_times_without_eight_heads_raises():
    with pytest.raises(HeadwiseError, match="the list must contain"):
        relative_times(12, 4, (1, 2))


def test_bandwidth_small_experiment_gives_verdict(tmp_path):
    statistics = measure(
        TrainedModelProvider(ExperimentStore(tmp_path), size=ExperimentSize(width=16, context=4)), rounds=3
    )
    assert list(statistics.by_condition("fused with backward")) == [1, 2, 4, 8, 16, 32, 64]
    assert CLAIM.judge(statistics)


def test_bandwidth_given_model_gives_verdict():
    model = Transformer(ModelSpec(vocab=11, context=16, layers=1, attention=AttentionSpec(width=16, heads=2)))
    statistics = time_layers_of_model_width(model, rounds=3)
    assert list(statistics.by_condition("batched forward")) == [1, 2, 4, 8, 16]
    assert CLAIM.judge(statistics)
