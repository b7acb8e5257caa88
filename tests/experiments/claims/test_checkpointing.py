import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.experiments.claim import VERDICTS
from headwise.experiments.claim_tests.checkpointing import (
    CLAIM,
    CheckpointingMeasurement,
    measure,
    measure_checkpointing,
    measure_model,
)
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.trained_model_provider import ExperimentSize, TrainedModelProvider
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import make_tokenizer
from headwise.text.corpus import Corpus


def rows(*cases):
    return [
        row
        for layers, memory, time in cases
        for row in (
            ("memory ratio", layers, [memory - 0.01, memory, memory + 0.01, memory, memory]),
            ("time ratio", layers, Statistic.median_of([time * (1 + turn / 100) for turn in range(-4, 5)])),
        )
    ]


CASES = {
    "holds": rows((2, 0.7, 1.2), (8, 0.2, 1.3)),
    "depends": rows((2, 0.9, 1.2), (8, 0.2, 1.3)),
    "does not hold": rows((2, 0.9, 1.2), (8, 0.2, 1.0)),
}


def test_checkpointing_memory_at_threshold_depends():
    # One measurement of 0.79 is below the threshold of 0.8; five between 0.77 and 0.81 are not.
    statistics = StatisticTable()
    for name, position, values in rows((2, 0.7, 1.3), (8, 0.2, 1.3)):
        statistics.add(name, position, values)
    statistics.add("memory ratio", 2, [0.79, 0.77, 0.81, 0.8, 0.78])
    assert CLAIM.judge(StatisticTable().add("memory ratio", 2, 0.79).add("time ratio", 2, 1.3)).word == "holds"
    assert str(CLAIM.correct_and_judge(statistics)[1]) == "undecided: at 2 layers the result is inconclusive"


def test_checkpointing_cost_memory_ratio_per_measurement():
    cost = CheckpointingMeasurement(
        Statistic.mean_of([100.0, 200.0]), Statistic.mean_of([50.0, 120.0]), Statistic.median_of([1.3])
    )
    assert cost.memory_ratio.values == (0.5, 0.6)


def make_model(layers=4, context=64, **fields):
    return Transformer(
        ModelSpec(vocab=31, context=context, layers=layers, attention=AttentionSpec(width=32, heads=4), **fields)
    )


@pytest.mark.slow
def test_measure_checkpointing_deep_model_uses_less_memory():
    model = make_model(layers=12)
    ids = torch.randint(31, (32, 64))
    cost = measure_checkpointing(model, ids, rounds=3, memory_runs=1)
    # Kept: every block's inside. Computed again: the stream between blocks (32·64·32 numbers, 1/4 MB each), one inside.
    assert cost.memory_ratio.is_interval_below(0.5)
    assert cost.stored.mean > 12 * 32 * 64 * 32 * 4 * 10 / 2**20  # ten tensors of the stream's size a block, at least
    assert not model.checkpointing
    assert all(weight.grad is None for weight in model.parameters())


def test_measure_checkpointing_unsupported_model_raises():
    with pytest.raises(HeadwiseError, match="no output"):
        measure_checkpointing(make_model(output="none"), torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(HeadwiseError, match="without sources"):
        measure_checkpointing(make_model(kind="encoder-decoder"), torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.slow
def test_checkpointing_small_experiment_gives_verdict(tmp_path):
    experiment = TrainedModelProvider(
        ExperimentStore(tmp_path), size=ExperimentSize(width=16, heads=4, context=64, batch_size=8)
    )
    statistics = measure(experiment, (1, 4), rounds=3, memory_runs=2)
    assert list(statistics.by_condition("time ratio")) == [1, 4]
    assert all(len(statistic.values) == 2 for statistic in statistics.by_condition("memory ratio").values())
    assert CLAIM.judge(statistics)


@pytest.mark.slow
def test_checkpointing_given_model_gives_verdict():
    model = make_model(context=32)
    text = "the cat sat on the mat and the dog ran " * 30
    model.tokenizer = make_tokenizer("character", Corpus.of([text]))
    statistics = measure_model(model, text, rounds=9, memory_runs=3)
    assert list(statistics.by_condition("memory ratio")) == [4]
    assert len(statistics["memory ratio", 4].values) == 3
    assert CLAIM.correct_and_judge(statistics)[1].word in VERDICTS


@pytest.mark.slow
def test_measure_checkpointing_attached_model_uses_less_memory():
    transformers = pytest.importorskip("transformers")
    from headwise.attached import attach

    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0}
    with attach(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))) as model:
        cost = measure_checkpointing(model, torch.randint(31, (16, 64)), rounds=3, memory_runs=1)
        assert cost.memory_ratio.is_interval_below(0.8)
        assert not model.checkpointing
