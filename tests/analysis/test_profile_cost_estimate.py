"""Expected time and memory of a profile, and profiles within a memory limit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.roles import profile_cost_estimate
from headwise.analysis.roles.profile_cost_estimate import estimate_profile, fit_batch_tokens, parse_bytes
from headwise.errors import HeadwiseError
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import byte_tokenizer

TEXTS = ["The teacher gave the students their homework. " * 3, "She read it, and he read it too. " * 4]


@pytest.fixture(scope="module")
def model() -> hw.Transformer:
    torch.manual_seed(0)
    spec = ModelSpec(vocab=257, context=256, layers=2, attention=AttentionSpec(width=32, heads=4))
    model = hw.Transformer(spec)
    model.tokenizer = byte_tokenizer()
    return model


def test_estimate_counts_tokens_and_weights(model: hw.Transformer) -> None:
    estimate = estimate_profile(model, TEXTS, relations=False)
    # 64 sequences of 2 · 16 repeated tokens are part of every profile
    tokens = sum(len(byte_tokenizer().encode(text)) for text in TEXTS) + 64 * 32
    assert (estimate.texts, estimate.tokens) == (2 + 64, tokens)
    assert estimate.weight_bytes == sum(weight.numel() * 4 for weight in set(model.parameters()))
    assert estimate.peak_bytes > estimate.weight_bytes
    assert estimate.seconds > 0
    assert "causal tests are not included" in str(estimate)
    assert json.loads(json.dumps(estimate.to_dict()))["batch_tokens"] == 2048
    assert estimate_profile(model, TEXTS).tokens > tokens  # the embedded documents with relations


def test_memory_limit_changes_the_batch_and_not_the_profile(model: hw.Transformer) -> None:
    full = estimate_profile(model, TEXTS * 20, relations=False)
    limit = full.peak_bytes - 3_000_000
    smaller = estimate_profile(model, TEXTS * 20, relations=False, memory_limit=limit)
    assert 64 <= smaller.batch_tokens < full.batch_tokens
    assert smaller.peak_bytes <= limit
    expected = hw.profile(model, TEXTS, relations=False, causal=False)
    actual = hw.profile(model, TEXTS, relations=False, causal=False, memory_limit=limit)
    for name, values in expected.metrics.items():
        assert np.allclose(values, actual.metrics[name], atol=1e-5, equal_nan=True), name


@pytest.mark.parametrize(
    ("limit", "fragment"), [("1 MB", "too small"), ("much", "size in bytes"), (True, "size in bytes")]
)
def test_memory_limit_that_does_not_fit_raises_before_the_work(
    model: hw.Transformer, limit: str, fragment: str
) -> None:
    with pytest.raises(HeadwiseError, match=rf"memory_limit.*{fragment}"):
        hw.profile(model, TEXTS, memory_limit=limit)
    assert fit_batch_tokens(model, 2048, None) == 2048


def test_estimate_of_a_layer_group_holds_fewer_sums(model: hw.Transformer) -> None:
    full, part = (estimate_profile(model, TEXTS, relations=False, only_layers=layers) for layers in (None, "0"))
    layer_heads = sum(address.layer == 0 for address in model.spec.head_addresses)
    expected = (full.peak_bytes - part.peak_bytes) / (len(model.spec.head_addresses) - layer_heads)
    scores = hw.profile(model, TEXTS, relations=False, causal=False).accumulator.sums.values()
    by_hand = sum(2 * array[:, 0].nbytes for array in scores)  # sums and counts of one head
    assert expected == by_hand


class Notes:
    """Progress callback that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, step: str, done: int, total: int | None) -> None: ...

    def print_note(self, text: str) -> None:
        self.lines.append(text)


def test_profile_of_a_large_model_prints_its_estimate_first(
    model: hw.Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large, callback = Notes(), Notes(), lambda *call: None
    settings: dict[str, Any] = {"relations": False, "causal": False}
    expected = estimate_profile(model, TEXTS, relations=False)
    first = hw.profile(model, TEXTS, **settings, progress=small)
    monkeypatch.setattr(profile_cost_estimate, "LARGE_WEIGHTS", 1)
    monkeypatch.setattr(profile_cost_estimate, "_available_bytes", lambda: 1000)
    second = hw.profile(model, TEXTS, **settings, progress=large)
    hw.profile(model, TEXTS, **settings, progress=callback)  # prints nothing, and raises nothing
    assert small.lines == []
    assert f"for {expected.tokens:,} tokens in {expected.texts:,} texts" in large.lines[0]
    assert "exceed the free memory of 0.00 GB" in large.lines[1]
    for name, values in first.metrics.items():
        assert np.array_equal(values, second.metrics[name], equal_nan=True), name


def test_sizes_are_parsed() -> None:
    assert parse_bytes("8 GB") == 8_000_000_000
    assert parse_bytes("1.5GiB") == 3 << 29
    assert parse_bytes(12) == 12


def test_command_prints_only_the_estimate(tmp_path: Path) -> None:
    spec = ModelSpec(vocab=257, context=64, layers=1, attention=AttentionSpec(width=16, heads=2))
    model = hw.Transformer(spec)
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXTS[0])
    command = [sys.executable, "-m", "headwise", "profile", str(tmp_path / "model"), str(tmp_path / "text.txt")]
    run = subprocess.run([*command, "--estimate", "--json"], capture_output=True, text=True, check=True)
    data = json.loads(run.stdout)
    assert set(data) == {"texts", "tokens", "batch_tokens", "seconds", "weight_bytes", "peak_bytes"}
