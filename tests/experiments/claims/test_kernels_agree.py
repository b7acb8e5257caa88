from importlib import import_module

import pytest
import torch

import headwise as hw
from headwise.experiments.claim_tests.kernels_agree import CLAIM, max_relative_error_by_backend, measure_model
from headwise.heads import MultiHeadAttention
from tests.attached.test_analysis import build
from tests.contract.layers import MODELS

KERNEL = import_module("headwise.kernels.blockwise")  # the package has the function by this name
CASES = {
    "holds": [("relative difference", "batched", 1e-7), ("relative difference", "fused", 2e-7),
              ("relative difference", "blockwise", 2e-7)],
    "depends": [("relative difference", "batched", 1e-7), ("relative difference", "fused", 2e-3),
                ("relative difference", "blockwise", 2e-7)],
    "does not hold": [("relative difference", form, 0.1) for form in ("batched", "fused", "blockwise")],
}  # fmt: skip


def test_max_deviation_covers_all_backends():
    layer = MultiHeadAttention(width=12, heads=3)
    deviations = max_relative_error_by_backend(layer, torch.randn(2, 7, 12))
    assert set(deviations) == {"batched", "fused", "blockwise"}
    assert max(deviations.values()) < 1e-5
    assert layer.backend == "auto"


def test_max_deviation_blockwise_uses_several_blocks(monkeypatch):
    calls = []
    inner = KERNEL.batched_rows
    monkeypatch.setattr(KERNEL, "batched_rows", lambda *args: calls.append(args[4:6]) or inner(*args))
    layer = MultiHeadAttention(width=16, heads=4)
    max_relative_error_by_backend(layer, torch.randn(1, 32, 16))
    rows = {args[0] for args in calls}
    assert rows == {range(13), range(13, 26), range(26, 32)}
    assert len(calls) == 2 * 3 * 2  # of heads, of rows, forward and again for the gradient


def test_max_deviation_wrong_block_is_detected(monkeypatch):
    inner = KERNEL.batched_rows
    # all but the first block of rows
    monkeypatch.setattr(KERNEL, "batched_rows", lambda *args: inner(*args) * (1.01 if args[4].start else 1))
    deviations = max_relative_error_by_backend(MultiHeadAttention(width=16, heads=4), torch.randn(1, 32, 16))
    assert deviations["blockwise"] > 1e-3
    assert deviations["batched"] < 1e-5


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "attached"])
def test_same_numbers_given_model_uses_own_calls(kind):
    torch.manual_seed(0)
    model = hw.attach(*build("llama")) if kind == "attached" else hw.Transformer(MODELS[kind])
    statistics = measure_model(model)
    differences = statistics.by_condition("relative difference")
    close = {backend: statistic.mean < 1e-5 for backend, statistic in differences.items()}
    assert close == {"batched": True, "fused": True, "blockwise": True}
    assert CLAIM.judge(statistics).word == "holds"
