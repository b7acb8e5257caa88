"""Rules of the experiment on gates and norms: each verdict can be reached. Texts follow the language."""

import pytest
import torch

from bench.gates_and_norms import (
    TOKENS,
    TRIGGERS,
    VARIANTS,
    bigram_table,
    judge_gate,
    judge_norm,
    measure,
    sample_texts,
)
from headwise import ModelSpec, Transformer
from headwise.spec import AttentionSpec

FULL, EMPTY, SOME, NOISY = [0.9] * 8, [0.0] * 8, [0.5] * 8, [0.0, 1.0] * 4


@pytest.mark.parametrize(
    ("plain", "gated", "verdict"),
    [
        (NOISY, EMPTY, "not testable: too few heads of plain models have a sink"),
        (FULL, EMPTY, "removes the sink"),
        (FULL, SOME, "reduces the sink, but does not remove it"),
        (FULL, [0.05, 0.25] * 4, "reduces the sink"),
        (FULL, [0.95] * 8, "does not reduce the sink"),
        (FULL, NOISY, "undecided"),
    ],
)
def test_judge_gate_reaches_each_verdict(plain: list[float], gated: list[float], verdict: str) -> None:
    assert judge_gate(plain, gated) == verdict


@pytest.mark.parametrize(
    ("plain", "normed", "verdict"),
    [
        (EMPTY, EMPTY, "not testable: too few rows of plain models are saturated"),
        (SOME, EMPTY, "keeps rows from saturating"),
        (FULL, SOME, "reduces saturation, but does not prevent it"),
        (SOME, FULL, "does not reduce saturation"),
        (FULL, NOISY, "undecided"),
    ],
)
def test_judge_norm_reaches_each_verdict(plain: list[float], normed: list[float], verdict: str) -> None:
    assert judge_norm(plain, normed) == verdict


def test_sample_texts_repeats_token_before_trigger() -> None:
    texts = sample_texts(bigram_table(3), 64, torch.Generator().manual_seed(1))
    after = texts[:, 2:-1] < TRIGGERS
    assert bool(after.any())
    assert torch.equal(texts[:, 3:][after], texts[:, 1:-2][after])
    assert bool((texts[:, 0] == TOKENS).all())
    assert int(texts[:, 1:].max()) < TOKENS


@pytest.mark.parametrize("name", ["plain", "gate per channel", "QK norm"])
def test_measure_of_uniform_attention_equals_closed_form(name: str) -> None:
    """Without W_Q every head attends uniformly: weight 1/(t + 1) on the first token, and no sink or saturated row."""
    attention = AttentionSpec(width=32, heads=4, **VARIANTS[name].attention)
    model = Transformer(ModelSpec(vocab=TOKENS + 1, context=48, layers=1, attention=attention, norm="rms")).eval()
    for head in model.heads:
        with torch.no_grad():
            head.W_Q.zero_()
    result = measure(model, bigram_table(0), 0)
    expected = sum(1 / (t + 1) for t in range(8, 47)) / 39
    assert result["mean weight on the first token"] == pytest.approx(expected, abs=1e-6)
    assert result["share of heads with a sink"] == result["share of saturated rows"] == 0
    assert result["99th percentile of |scores|"] == 0
