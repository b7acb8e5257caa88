"""Streaming plans, cache studies and pass keys of attached models equal those of the same model loaded natively."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import headwise as hw
from headwise.cli import app
from headwise.compression import StreamingRequest
from headwise.compression.cache_study import CacheStudyConfig, cache_study
from headwise.compression.head_compression_cost import streaming_cost
from headwise.compression.passkey_test import make_passkey_cases, run_passkeys
from tests.attached.test_analysis import TEXTS, build, save_model

LINES = [f"{TEXTS[i % 2]} and {'abcdefgh'[i]} again, {TEXTS[(i + 1) % 2]}" for i in range(4)]
OPTIONS: Any = {"sink_tokens": 2, "window": 9, "corpus": LINES, "max_length": 60, "gate_steps": 3}


def scores(plan: hw.Plan) -> np.ndarray:
    return np.array(plan.cache_scores)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranking", ["attention", "output", "loss", "gates", "role", "random"])
def test_plan_streaming_attached_equals_native(name: str, ranking: str, tmp_path: Path) -> None:
    native, attached = hw.load(save_model(name, tmp_path)), hw.attach(*build(name))
    request = StreamingRequest(0.5, ranking=ranking, rounds=2 if ranking == "loss" else 1, **OPTIONS)
    a, b = (hw.plan_streaming(model, request) for model in (native, attached))
    assert [rule.heads for rule in b.cache] == [rule.heads for rule in a.cache]
    np.testing.assert_allclose(scores(b), scores(a), atol=2e-5, rtol=1e-4)
    assert not attached.spec.cache
    assert all(layer.cache_gate is None for layer in attached.attention_layers())


@pytest.mark.parametrize("name", ["falcon", "gemma2", "mistral"])
def test_plan_streaming_other_backends_rank_all_heads(name: str) -> None:
    """Models whose attention runs on the eager function, or computes scores itself, or has a window."""
    attached = hw.attach(*build(name))
    for ranking in ("attention", "output", "loss", "gates", "role"):
        if name == "falcon" and ranking == "gates":
            continue  # it calls SDPA itself
        options = OPTIONS | {"window": 2}  # smaller than the window of the layers
        plan = hw.plan_streaming(attached, StreamingRequest(0.5, ranking=ranking, **options))
        assert len(plan.cache_scores) == len(attached.spec.cached_kv_head_addresses)
        assert np.isfinite(scores(plan)).all()
        if ranking in ("output", "loss"):
            assert np.abs(scores(plan)).max() > 0


def test_cache_study_attached_equals_native(tmp_path: Path) -> None:
    native, attached = hw.load(save_model("llama", tmp_path / "model")), hw.attach(*build("llama"))
    study = CacheStudyConfig(
        fraction=0.5, sink_tokens=2, window=9, corpus=LINES, max_length=60, seeds=2, fractions=(1.0,), bits=8
    )
    a = cache_study(native, study)  # pyright: ignore[reportArgumentType]
    b = cache_study(attached, study, out=tmp_path / "small", save_plan=tmp_path / "plan.json")
    for result in (a, b):
        assert result.report is not None
    assert (b.report.bytes_before, b.report.bytes_after) == (a.report.bytes_before, a.report.bytes_after)  # pyright: ignore
    native_rows, attached_rows = (
        np.array([row[1:] for row in result.report.loss_rows()], float)  # pyright: ignore[reportOptionalMemberAccess]
        for result in (a, b)
    )
    np.testing.assert_allclose(attached_rows, native_rows, atol=1e-4)
    np.testing.assert_allclose(
        [point.loss_increase.mean for point in b.curve], [point.loss_increase.mean for point in a.curve], atol=1e-4
    )
    assert b.model is not None
    reopened = hw.attach(type(b.model).reopen(tmp_path / "small").model)  # pyright: ignore[reportAttributeAccessIssue]
    assert reopened.spec.cache == b.model.spec.cache
    assert hw.Plan.load(tmp_path / "plan.json") == b.plan


def test_streaming_cost_attached_equals_native(tmp_path: Path) -> None:
    """The sentence about streaming in `hw.describe` has the same figures. Another KV head gives others."""
    native, attached = hw.load(save_model("llama", tmp_path)), hw.attach(*build("llama"))
    first, second, other = (
        streaming_cost(model, head, " ".join(LINES * 12))
        for model, head in ((native, "1.1"), (attached, "1.1"), (attached, "1.0"))
    )
    assert first
    assert second
    assert other
    (a,), (b,), (c,) = first.costs, second.costs, other.costs  # random weights need no context: only running text
    assert (a.kind, a.texts) == (b.kind, b.texts) == ("running text", 8)
    assert b.full_loss == pytest.approx(a.full_loss, abs=1e-5)
    assert b.loss_increase.mean == pytest.approx(a.loss_increase.mean, abs=1e-6)
    assert abs(a.loss_increase.mean - c.loss_increase.mean) > 1e-5
    assert not attached.spec.cache


def test_passkeys_attached_equal_native(tmp_path: Path) -> None:
    native, attached = hw.load(save_model("llama", tmp_path)), hw.attach(*build("llama"))
    text = " ".join(LINES * 4)
    cases = make_passkey_cases(native, text, 120, 2)
    assert make_passkey_cases(attached, text, 120, 2) == cases
    policies = {"0.*": hw.CachePolicy(sink_tokens=2, window=16)}
    assert run_passkeys(attached, cases, lambda: hw.per_head_cache(attached, policies)).correct == (
        run_passkeys(native, cases, lambda: hw.apply(hw.plan_pruning(native, cache=policies), native).cache()).correct  # pyright: ignore
    )


def test_cache_command_on_attached_model(tmp_path: Path) -> None:
    folder = save_model("phi3", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(LINES * 2))
    arguments = ["cache", str(folder), str(text), "--fraction", "0.5", "--window", "9", "--max-length", "60", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--seeds", "1", "--out", str(tmp_path / "small")])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)["report"]
    assert report["bytes_after"] < report["bytes_before"]
    assert hw.load(tmp_path / "small").spec.cache
