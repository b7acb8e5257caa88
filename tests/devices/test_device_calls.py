"""Calls on the pretend device that the list of public functions does not cover."""

from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from tests.devices.pretend_device import pretend_device
from tests.devices.test_pretend_device import make_model

IDS = torch.tensor([[3, 5, 7, 9, 11], [4, 6, 8, 10, 12]])


@pytest.mark.parametrize("float64", [True, False])
@pytest.mark.parametrize("basis", ["given", "balanced", "random"])
def test_quantize_on_device_equals_cpu(basis: Any, float64: bool) -> None:
    expected = hw.quantize(make_model("decoder", "cpu"), 8, basis=basis)(IDS)
    with pretend_device(float64=float64):
        result = hw.quantize(make_model("decoder", "pretend"), 8, basis=basis)(IDS.to("pretend")).cpu()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["decoder", "llama"])
def test_generate_sampled_same_seed_gives_same_tokens(name: str) -> None:
    with pretend_device(float64=False):
        model = make_model(name, "pretend")
        prompt = IDS[:1].to("pretend")
        tokens = [model.generate(prompt, max_new_tokens=6, temperature=1.0, seed=seed) for seed in (4, 4, 5)]
        lists = [row.tolist() if isinstance(row, torch.Tensor) else row for row in tokens]
    assert lists[0] == lists[1]
    assert lists[0] != lists[2]


def test_forward_ids_on_other_device_raises() -> None:
    with pretend_device():
        model = make_model("decoder", "pretend")
        with pytest.raises(HeadwiseError, match="device"):
            model(IDS)


def test_save_on_device_reopens_same_weights(tmp_path: Any) -> None:
    with pretend_device(float64=False):
        model = make_model("decoder", "pretend")
        model.save(tmp_path / "model")
        expected = model(IDS.to("pretend")).cpu()
    torch.testing.assert_close(hw.load(tmp_path / "model").eval()(IDS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_blockwise_backward_on_device_equals_cpu(dropout: float) -> None:
    def gradient(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        layer = hw.MultiHeadAttention(width=16, heads=4, dropout=dropout, backend="blockwise").to(device)
        x = torch.linspace(-1, 1, 2 * 6 * 16).reshape(2, 6, 16).to(device).requires_grad_()
        torch.manual_seed(1)
        layer(x).square().sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    with pretend_device(float64=False):
        result = gradient("pretend")
    torch.testing.assert_close(result, gradient("cpu"), rtol=1e-4, atol=1e-5)
