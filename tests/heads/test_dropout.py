"""Head dropout: it keeps the mean, never drops all heads, and has no effect in evaluation mode."""

import math
from typing import Any

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.heads import HeadDropout, MultiHeadAttention
from headwise.heads.head_dropout import head_dropout_gate, set_training_progress
from headwise.model import Transformer
from tests.contract.layers import MODELS, random_tensor

DTYPE_EXAMPLE = torch.zeros(1, dtype=torch.float64)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("heads", [1, 2, 7])
def test_head_dropout_gate_mean_is_one(rate: float, heads: int) -> None:
    """The mean of n draws is within 5 standard errors of 1 for every head, which fails once in a million runs."""
    torch.manual_seed(0)
    gate = head_dropout_gate(100_000, heads, rate, DTYPE_EXAMPLE)
    error = gate.std(0) / math.sqrt(len(gate))
    assert bool(((gate.mean(0) - 1).abs() <= 5 * error + 1e-7).all())


def test_head_dropout_layer_mean_equals_eval_output() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(width=8, heads=4, out_bias=True, head_dropout=0.4).double()
    x = random_tensor(1, 3, 8)
    draws = layer(x.expand(50_000, -1, -1)).detach()
    error = draws.std(0) / math.sqrt(len(draws))
    assert bool(((draws.mean(0) - layer.eval()(x)[0]).abs() <= 5 * error).all())


@pytest.mark.parametrize("rate", [0.3, 0.99, 1 - 1e-9])
def test_head_dropout_gate_keeps_a_head_and_sums_to_heads(rate: float) -> None:
    torch.manual_seed(0)
    gate = head_dropout_gate(20_000, 5, rate, DTYPE_EXAMPLE)
    num_kept = (gate > 0).sum(1, keepdim=True)
    assert num_kept.min() == 1
    torch.testing.assert_close(gate.sum(1), torch.full((20_000,), 5.0, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(gate, (gate > 0) * 5.0 / num_kept, rtol=0, atol=1e-6, check_dtype=False)


def test_head_dropout_gate_keep_rate_matches_formula() -> None:
    """P(kept) = 1 − rate + P(all heads are below the rate and this one has the largest noise) = 1 − rate + rate^H / H."""
    torch.manual_seed(0)
    n, heads, rate = 100_000, 3, 0.6
    keep_rate = (head_dropout_gate(n, heads, rate, DTYPE_EXAMPLE) > 0).double().mean(0)
    expected_rate = 1 - rate + rate**heads / heads
    assert bool(((keep_rate - expected_rate).abs() <= 5 * math.sqrt(expected_rate * (1 - expected_rate) / n)).all())


def test_head_dropout_drops_full_heads_per_example() -> None:
    torch.manual_seed(0)
    z = torch.ones(64, 4, 3, 5)
    out = HeadDropout(0.5)(z)
    assert torch.equal(out, out[:, :, :1, :1].expand_as(out)), "all places and channels of a head alike"
    assert len(out[:, :, 0, 0].unique(dim=0)) > 4, "not all examples alike"


def test_head_dropout_eval_is_identity() -> None:
    z, drop = torch.randn(2, 4, 3, 5), HeadDropout(0.9)
    assert drop.eval()(z) is z
    assert HeadDropout(0.0)(z) is z


def test_head_dropout_single_head_is_unchanged() -> None:
    z = torch.randn(8, 1, 3, 5)
    assert torch.equal(HeadDropout(0.9)(z), z)
    assert HeadDropout(0.9)(torch.zeros(2, 0, 3, 5)).shape == (2, 0, 3, 5)


def test_head_dropout_dropped_heads_get_no_gradient() -> None:
    torch.manual_seed(1)
    z = torch.ones(1, 4, 3, 5, requires_grad=True)
    out = HeadDropout(0.5)(z)
    out.sum().backward()
    assert torch.equal(z.grad, out.detach())  # pyright: ignore


SCHEDULES = {
    "constant": {0.0: 0.4, 0.25: 0.4, 0.5: 0.4, 1.0: 0.4},
    "ramp": {0.0: 0.0, 0.25: 0.1, 0.5: 0.2, 1.0: 0.4},
    "v": {0.0: 0.4, 0.25: 0.2, 0.5: 0.0, 0.75: 0.2, 1.0: 0.4},
}


@pytest.mark.parametrize(("schedule", "rates"), SCHEDULES.items())
def test_head_dropout_rate_follows_schedule(schedule: Any, rates: dict[float, float]) -> None:
    drop = HeadDropout(0.4, schedule)
    assert drop.rate == pytest.approx(rates[0.0])
    for done, rate in rates.items():
        drop.set_progress(done)
        assert drop.rate == pytest.approx(rate)


def test_set_training_progress_reaches_every_layer() -> None:
    spec = MODELS["encoder-decoder"]
    attention = type(spec.attention)(width=12, heads=4, head_dropout=0.4, head_dropout_schedule="ramp")
    model = Transformer(type(spec)(17, 19, 2, attention, kind="encoder-decoder"))
    set_training_progress(model, 0.5)
    assert [layer.head_dropout.rate for layer in model.attention_layers()] == pytest.approx([0.2] * 6)


@pytest.mark.parametrize("done", [-0.1, 1.1])
def test_head_dropout_progress_out_of_range_raises(done: float) -> None:
    with pytest.raises(HeadwiseError, match=f"fraction={done}"):
        HeadDropout(0.1).set_progress(done)
