"""A model with zero queries has uniform attention: its surface metrics match closed forms."""

from math import lgamma

import numpy as np
import pytest
import torch

from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.token_classes import CLASSES
from headwise.spec import ModelSpec
from tests.analysis.dense_reference import batch_without_repeats, streaming_and_dense
from tests.contract.layers import SMALL, make_model

N = 64
HARMONIC = float((1 / np.arange(1, N + 1)).sum())
WANT = {
    "entropy": lgamma(N + 1) / N, "confidence": HARMONIC / N, "first": HARMONIC / N, "distance": (N - 1) / 4,
    "offset 1": (HARMONIC - 1) / (N - 1), "relative entropy": 1.0, "participation": (N + 1) / 2,
}  # fmt: skip


@pytest.mark.parametrize("height", [16, 128])
def test_default_metrics_zero_queries_match_uniform_closed_form(height: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "BLOCK_ROWS", height)
    model = make_model(ModelSpec(vocab=N, context=N, layers=2, mlp_width=23, attention=SMALL)).float()
    queries = SMALL.heads * 6
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qkv.qkv" in name:
                parameter[:queries] = 0
    accumulator, _ = streaming_and_dense(model, [batch_without_repeats(N, batch=3)], torch.zeros(N, len(CLASSES)))
    for name, want in WANT.items():
        assert accumulator.mean(name) == pytest.approx([want] * 8, rel=1e-5), name
    assert WANT["entropy"] == pytest.approx(3.2058, abs=5e-5)
