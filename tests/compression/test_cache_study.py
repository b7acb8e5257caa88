"""Cache studies: losses and bytes of reduced caches, compared with explicit computations."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.compression import PruneRequest, StreamingRequest
from headwise.compression.cache_study import CacheStudyConfig, cache_study
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.distributed.parallel_strategy_cost import cache_bytes
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol
from headwise.spec import CachePolicy
from tests.distillation.tiny import make_model

LINES = [f"{n} and {n} are {2 * n}, and so on and so on, and on it goes." for n in range(8)]


def loss_after_position(model: ModelProtocol, lines: list[str], position: int) -> list[tuple[float, int]]:
    """Return the summed loss and the number of tokens after `position` for each text, from plain logits."""
    sums = []
    assert model.tokenizer is not None
    for line in lines:
        ids = torch.tensor([model.tokenizer.encode(line)])
        with torch.no_grad():
            logits = model(ids)[0, position:-1]
        targets = ids[0, position + 1 :]
        sums.append((F.cross_entropy(logits, targets, reduction="sum").item(), len(targets)))
    return sums


def test_cache_study_losses_cover_tokens_after_eviction() -> None:
    model = make_model(rotary=True, kv_heads=2)
    result = cache_study(model, CacheStudyConfig(heads="1.*", sink_tokens=2, window=6, corpus=LINES, seeds=2))
    report = result.report
    assert report is not None
    assert result.model is not None
    assert (report.skip_tokens, report.texts) == (8, 8)
    for estimate, evaluated in ((report.loss_before, model), (report.loss_after, result.model)):
        sums = loss_after_position(evaluated, LINES, 8)
        assert estimate.mean == pytest.approx(sum(s for s, _ in sums) / sum(n for _, n in sums), abs=1e-5)
    assert report.loss_increase.mean == pytest.approx(report.loss_after.mean - report.loss_before.mean, abs=1e-6)
    assert report.loss_increase.low <= report.loss_increase.mean <= report.loss_increase.high
    assert len(report.random) == 2
    # 2 layers, 2 KV heads, a key and a value of 4 float32 numbers; the KV heads of layer 1 cache 8 tokens.
    length = min(1024, model.spec.context)
    assert report.bytes_before == 4 * length * 2 * 4 * 4
    assert report.bytes_after == 2 * length * 2 * 4 * 4 + 2 * 8 * 2 * 4 * 4


def test_cache_policy_no_difference_before_eviction() -> None:
    model = make_model()
    small = hw.apply(hw.plan_pruning(model, cache={"*": CachePolicy(sink_tokens=2, window=6)}), model)
    full_losses, small_losses = (np.array(loss_after_position(evaluated, LINES, 0)) for evaluated in (model, small))
    difference_after = np.array(loss_after_position(small, LINES, 8)) - np.array(loss_after_position(model, LINES, 8))
    assert (small_losses - full_losses)[:, 0] == pytest.approx(difference_after[:, 0], abs=1e-4)


def test_cache_study_selects_and_evaluates_on_different_texts() -> None:
    model = make_model()
    result = cache_study(model, CacheStudyConfig(fraction=0.5, sink_tokens=1, window=8, bits=8, corpus=LINES, seeds=1))
    assert result.plan is not None
    assert result.report is not None
    assert result.report.texts == 4
    assert {rule.policy for rule in result.plan.cache} == {
        CachePolicy(bits=8, sink_tokens=1, window=8),
        CachePolicy(bits=8),
    }
    assert sum(len(rule.heads) for rule in result.plan.cache) == 8
    random_plan = hw.plan_streaming(model, StreamingRequest(0.5, sink_tokens=1, window=8, ranking="random", seed=3))
    assert {rule.policy for rule in random_plan.cache} == {CachePolicy(sink_tokens=1, window=8)}
    other = cache_study(
        model, CacheStudyConfig(fraction=0.5, sink_tokens=1, window=8, corpus=LINES[:4], test=LINES[4:], seeds=0)
    )
    assert other.report is not None
    assert other.report.increase_over_random is None


def test_cache_study_curve_contains_plan_point() -> None:
    model = make_model()
    study = CacheStudyConfig(fraction=0.5, sink_tokens=1, window=8, corpus=LINES, seeds=2, fractions=(0.5, 1.0))
    result = cache_study(model, study)
    assert result.report is not None
    ranked = [point for point in result.curve if point.label == "output"]
    assert [point.streaming_heads for point in ranked] == [4, 8]
    assert ranked[0].loss_increase == result.report.loss_increase
    assert ranked[0].cache_bytes == result.report.bytes_after
    all_streaming = [point for point in result.curve if point.streaming_heads == 8]
    assert all_streaming[0].loss_increase.mean == pytest.approx(all_streaming[1].loss_increase.mean), (
        "a fraction of 1 selects all KV heads, by rank or at random"
    )
    assert [point.bits for point in result.curve if point.label == "all at fewer bits"] == [16, 8, 4]
    rows = {
        point.label
        for point in cache_study(model, CacheStudyConfig(fractions=(0.5,), sink_tokens=1, window=8, corpus=LINES)).curve
    }
    assert rows == {"output", "random", "all at fewer bits"}


def test_cache_study_saved_model_applies_policies(tmp_path: Path) -> None:
    model = make_model()
    study = CacheStudyConfig(heads="0.1,1.*", sink_tokens=2, window=5, bits=8, corpus=LINES, seeds=0, passkeys=0)
    result = cache_study(model, study, out=tmp_path / "small", save_plan=tmp_path / "plan.json")
    assert result.plan is not None
    loaded = hw.load(tmp_path / "small")
    assert isinstance(loaded, hw.Transformer)
    assert loaded.spec.cache == result.plan.cache
    prompt = torch.arange(model.spec.context)[None]  # fills the context
    with torch.no_grad():
        cache = loaded.cache()
        loaded(prompt, cache=cache)
    assert cache.nbytes == cache_bytes(loaded.spec, prompt.shape[1])
    assert loaded.generate(LINES[3], 8) == hw.apply(hw.Plan.load(tmp_path / "plan.json"), model).generate(LINES[3], 8)
    reapplied = cache_study(model, CacheStudyConfig(plan=hw.Plan.load(tmp_path / "plan.json"), corpus=LINES, seeds=0))
    assert reapplied.report == result.report


def test_cache_study_passkeys_relative_to_full_cache() -> None:
    model = make_model(rotary=True)
    study = CacheStudyConfig(
        bits=16, corpus=["word after word and so on and on " * 20], max_texts=8, max_length=120, passkeys=2, seeds=0
    )
    result = cache_study(model, study)
    assert result.report is not None
    assert result.report.passkeys == (0, 0), "a model with random weights finds no pass key"


def test_cache_study_invalid_arguments_raise() -> None:
    model = make_model()
    for study, message in (
        (dict[str, object](), "how to reduce the cache"),
        ({"fraction": 0.5, "heads": "0.1"}, "how to reduce the cache"),
        ({"bits": 5}, "32, 16, 8, 4 bits"),
        ({"fraction": 0.5, "sink_tokens": -1}, "must be an integer number of tokens of"),
        ({"plan": hw.plan_pruning(model, PruneRequest(heads="0.1", fold_mean=False))}, "changes only caches"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            CacheStudyConfig(**study)  # pyright: ignore[reportArgumentType]
    for evaluated, study, message in (
        (make_model(kind="encoder"), CacheStudyConfig(bits=8), "only a decoder"),
        (make_model(kind="encoder-decoder"), CacheStudyConfig(bits=8), "only a decoder"),
        (model, CacheStudyConfig(fraction=0.5, corpus=LINES), "no token is evicted"),
        (model, CacheStudyConfig(fraction=1.5, sink_tokens=1, window=8, corpus=LINES), "from 0 to 1"),
        (
            model,
            CacheStudyConfig(fraction=0.5, sink_tokens=1, window=8, corpus=LINES, ranking="magic"),
            "unknown method",
        ),
        (model, CacheStudyConfig(heads="0.1", sink_tokens=10, window=90, corpus=LINES), "no text is longer than 101"),
        (
            model,
            CacheStudyConfig(fraction=0.5, sink_tokens=1, window=8, corpus=LINES, max_texts=1),
            "Increase max_texts",
        ),
        (model, CacheStudyConfig(plan=hw.plan_pruning(make_model(1), cache={"0.1": 8}), corpus=LINES), "other weights"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            cache_study(evaluated, study)
    with pytest.raises(HeadwiseError, match="how to reduce the cache"):
        cache_study(model, CacheStudyConfig(fractions=(0.5,), sink_tokens=1, window=8, corpus=LINES), out="nowhere")
    with pytest.raises(HeadwiseError, match="no text is longer than 71 tokens"):
        PairedEvaluator.of(model, LINES, skip_tokens=70)
