"""Attention patterns in DuoAttention's format become streaming plans; damaged files raise."""

import json
from pathlib import Path

import pytest

import headwise as hw
from headwise.compression import StreamingRequest
from headwise.compression.cache_study import CacheStudyConfig, cache_study
from headwise.compression.duo_attention_pattern_reader import read_attention_pattern
from tests.distillation.tiny import make_model

LINES = [f"{n} and {n} are {2 * n}, and so on and so on, and on it goes." for n in range(6)]


def write_pattern(folder: Path, text: str = "0.9\t0.1\n0.0\t1.0\n") -> Path:
    (folder / "full_attention_heads.tsv").write_text(text)
    (folder / "config.json").write_text(json.dumps({"sink_size": 3, "recent_size": 7, "sparsity": 0.5}))
    return folder / "full_attention_heads.tsv"


def test_pattern_lowest_scores_stream(tmp_path: Path) -> None:
    model = make_model(rotary=True, kv_heads=2)  # 2 layers
    plan = hw.plan_streaming(model, StreamingRequest.from_pattern(write_pattern(tmp_path)))
    assert plan.cache[0].heads == ("0.1", "1.0")
    assert plan.cache[0].policy == hw.CachePolicy(sink_tokens=3, window=7)
    assert plan.cache_scores == (0.9, 0.1, 0.0, 1.0)
    assert plan.cache_ranking == "pattern"
    quarter = hw.plan_streaming(
        model, StreamingRequest(0.25, ranking="pattern", pattern=write_pattern(tmp_path), bits=8, window=5)
    )
    assert {rule.policy.window: rule.heads for rule in quarter.cache}[5] == ("1.0",)


def test_pattern_cache_study_uses_file(tmp_path: Path) -> None:
    study = CacheStudyConfig(
        fraction=0.5, window=6, sink_tokens=2, corpus=LINES, seeds=1, pattern=write_pattern(tmp_path)
    )
    result = cache_study(make_model(rotary=True, kv_heads=2), study)
    assert result.plan is not None
    assert result.plan.cache[0].heads == ("0.1", "1.0")


@pytest.mark.parametrize("text", ["", "a\tb\n", "1\t2\n3\n", "nan\t1\n1\t1\n", "1\t1e999\n0\t0\n"])
def test_pattern_damaged_file_raises(tmp_path: Path, text: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"full_attention_heads\.tsv"):
        read_attention_pattern(write_pattern(tmp_path, text))


def test_pattern_of_other_model_raises(tmp_path: Path) -> None:
    model = make_model(rotary=True, kv_heads=2)
    for text in ("1\t1\n", "1\n1\n", "1\t0\n1\t0\n1\t0\n"):
        with pytest.raises(hw.HeadwiseError, match="pattern of this model"):
            hw.plan_streaming(model, StreamingRequest.from_pattern(write_pattern(tmp_path, text)))
    with pytest.raises(hw.HeadwiseError, match="Set both or neither"):
        StreamingRequest(0.5, ranking="pattern")
    with pytest.raises(hw.HeadwiseError, match=r"missing\.tsv: no such file"):
        StreamingRequest.from_pattern(tmp_path / "missing.tsv")
    with pytest.raises(hw.HeadwiseError, match="2 layers and 2 KV heads, but the model has 2 layers and 4 KV heads"):
        hw.plan_streaming(model, StreamingRequest.from_pattern(write_pattern(tmp_path, "1\n1\n")))
    with pytest.raises(hw.HeadwiseError, match="Set both or neither"):
        StreamingRequest(0.5, pattern="x.tsv")
