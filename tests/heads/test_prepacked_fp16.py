"""In a step, weights at few bits are multiplied by through another layout of them: the same as by their plain numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.compression.quantize import dequantise, quantise, stored
from headwise.heads import quantized_weights as packed_room
from headwise.kernels.autotuned_linear import SETTING
from headwise.kernels.prepacked_fp16 import HALF_TOLERANCE, half_form
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from tests.contract.layers import fill

MIXED = {"*": 8, "0.1": 4, "0.2:qk": 16, "1.3:vo": 2, "mlp": 3, "vocabulary": 16}
IDS = torch.tensor([[3, 30, 0, 7], [1, 2, 5, 9]])


def decoder(**more: Any) -> Transformer:
    """Odd sizes, a key head for two heads, biases."""
    heads = AttentionSpec(width=72, heads=4, kv_heads=2, head_dim=34, rotary=Rotary(), bias=True, out_bias=True)
    spec = ModelSpec(
        vocab=31, context=19, layers=2, attention=heads, hidden=50, positions="none", mlp_bias=True, **more
    )
    model = Transformer(spec).eval()
    fill(model)
    return model


@torch.no_grad()
def steps(model: Transformer) -> Tensor:
    cache = model.cache()
    return torch.cat([model(token, cache=cache) for token in IDS.split(1, 1)], 1)


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "measured")


def far(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("size", [(37, 51), (8, 64), (1, 3)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_form_at_16_bits_is_the_plain_product(size: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    weight, x, bias = torch.randn(size), torch.randn(2, rows, size[1]), torch.randn(size[0])
    form = half_form(weight)
    if form is None:
        pytest.skip("this build of torch has no such product")
    want = torch.nn.functional.linear(x, weight, bias)
    assert far(form(x, bias), want) < HALF_TOLERANCE
    exact = weight.half().float()
    assert far(form(x, None), torch.nn.functional.linear(x, exact)) < 1e-6


def test_what_16_bit_floats_cannot_hold_has_no_form() -> None:
    assert half_form(torch.full((3, 4), 1e5)) is None
    assert half_form(torch.full((3, 4), 1e-9)) is None
    assert half_form(torch.zeros(0, 4)) is None


@pytest.mark.usefixtures("forms")
@pytest.mark.parametrize("weights", [16, 8, 4, 3, 2, MIXED], ids=str)
def test_steps_by_forms_are_those_by_plain_numbers(weights: object, monkeypatch: pytest.MonkeyPatch) -> None:
    small = quantise(decoder(), weights)  # pyright: ignore[reportArgumentType]
    got = steps(small)
    monkeypatch.setenv(SETTING, "torch")
    assert far(got, steps(small)) < 2e-3
    assert far(got, steps(dequantise(small))) < 2e-3


@pytest.mark.usefixtures("forms")
def test_rounded_inputs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are rounded row by row before a form, as before plain numbers."""
    for group in (32, 128):
        small = quantise(decoder(), 8, group=group, activations=8)
        got = steps(small)
        monkeypatch.setenv(SETTING, "torch")
        assert far(got, steps(small)) < 2e-2
        monkeypatch.setenv(SETTING, "measured")


@pytest.mark.usefixtures("forms")
def test_looking_cutting_and_saving(tmp_path: Path) -> None:
    small = quantise(decoder(tied=True), 16)
    before = steps(small)
    with hw.record(small):
        assert torch.equal(steps(small), before)
    again = hw.load(small.save(tmp_path / "small"))
    assert torch.equal(steps(again), before)  # pyright: ignore[reportArgumentType]
    assert stored(small)[-1].bytes == small.spec.weight_bytes()
    cut = small.without("0.1,1.2")
    assert far(steps(cut), steps(dequantise(cut))) < 2e-3
    assert stored(cut)[-1].bytes == cut.spec.weight_bytes()


@pytest.mark.usefixtures("forms")
def test_weights_that_are_written_over_get_a_new_form() -> None:
    small = quantise(decoder(), 8)
    before = steps(small)
    with torch.no_grad():
        small.blocks[0].mlp.up.get_buffer("scales8").mul_(3)  # pyright: ignore
    assert far(steps(small), before) > 1e-2


@pytest.mark.usefixtures("forms")
def test_where_there_is_no_such_product_plain_numbers_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_room, "half_form", lambda weight: None)
    small = quantise(decoder(), 4)
    got = steps(small)
    monkeypatch.setenv(SETTING, "torch")
    assert torch.allclose(got, steps(small), rtol=1e-5, atol=1e-5)


def test_weights_beyond_16_bit_floats_are_refused() -> None:
    model = decoder()
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.mul_(1e7)  # pyright: ignore
    with pytest.raises(hw.HeadwiseError, match="too large for 16-bit floats"):
        quantise(model, 16)
