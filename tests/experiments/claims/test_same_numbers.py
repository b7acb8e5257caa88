from importlib import import_module

import pytest
import torch

import headwise as hw
from headwise.experiments.claims.same_numbers import CLAIM, furthest, on
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


def test_a_form_that_is_told_apart():
    layer = MultiHeadAttention(width=12, heads=3)
    found = furthest(layer, torch.randn(2, 7, 12))
    assert set(found) == {"batched", "fused", "blockwise"}
    assert max(found.values()) < 1e-5
    assert layer.backend == "auto"


def test_the_blockwise_form_runs_in_several_blocks(monkeypatch):
    called = []
    inner = KERNEL.batched_rows
    monkeypatch.setattr(KERNEL, "batched_rows", lambda *given: called.append(given[4:6]) or inner(*given))
    layer = MultiHeadAttention(width=16, heads=4)
    furthest(layer, torch.randn(1, 32, 16))
    rows = {given[0] for given in called}
    assert rows == {range(13), range(13, 26), range(26, 32)}
    assert len(called) == 2 * 3 * 2  # of heads, of rows, forward and again for the gradient


def test_a_block_that_is_computed_wrongly_is_found(monkeypatch):
    inner = KERNEL.batched_rows
    monkeypatch.setattr(
        KERNEL, "batched_rows", lambda *given: inner(*given) * (1.01 if given[4].start else 1)
    )  # all but the first block of rows
    found = furthest(MultiHeadAttention(width=16, heads=4), torch.randn(1, 32, 16))
    assert found["blockwise"] > 1e-3
    assert found["batched"] < 1e-5


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "attached"])
def test_on_a_given_model_its_own_calls_are_taken(kind):
    torch.manual_seed(0)
    model = hw.attach(*build("llama")) if kind == "attached" else hw.Transformer(MODELS[kind])
    found = on(model)
    assert {at: figure.mean < 1e-5 for at, figure in found.at("relative difference").items()} == {
        "batched": True, "fused": True, "blockwise": True,
    }  # fmt: skip
    assert CLAIM.judge(found).word == "holds"
