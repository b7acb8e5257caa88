"""Prepacked quantized weights in decode steps give the same results as dequantized weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.compression.quantize import dequantize, quantize, weight_footprints
from headwise.heads import quantized_layers
from headwise.kernels.matmul_tuner import KERNEL_ENV_VAR, MatmulTuner
from headwise.kernels.prepacked_fp16 import FP16_TOLERANCE, make_prepacked_matmul
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from tests.contract.layers import randomize

MIXED_BITS = {"*": 8, "0.1": 4, "0.2:qk": 16, "1.3:vo": 2, "mlp": 3, "vocabulary": 16}
IDS = torch.tensor([[3, 30, 0, 7], [1, 2, 5, 9]])


def decoder(**extra: Any) -> Transformer:
    """Return a decoder with odd sizes, a KV head shared by two heads, and biases."""
    heads = AttentionSpec(width=72, heads=4, kv_heads=2, head_dim=34, rotary=Rotary(), bias=True, out_bias=True)
    spec = ModelSpec(
        vocab=31, context=19, layers=2, attention=heads, mlp_width=50, positions="none", mlp_bias=True, **extra
    )
    model = Transformer(spec).eval()
    randomize(model)
    return model


@torch.no_grad()
def run_steps(model: Transformer, kernel: str | None = None) -> Tensor:
    """Return the logits of decode steps. `kernel` replaces the matrix product that the model was created with."""
    if kernel is not None:
        model.matmul_tuner = MatmulTuner(kernel)
    cache = model.cache()
    return torch.cat([model(token, cache=cache) for token in IDS.split(1, 1)], 1)


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNEL_ENV_VAR, "measured")


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("size", [(37, 51), (8, 64), (1, 3)])
@pytest.mark.parametrize("rows", [1, 3])
def test_prepack_fp16_product_equals_linear(size: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    weight, x, bias = torch.randn(size), torch.randn(2, rows, size[1]), torch.randn(size[0])
    prepacked = make_prepacked_matmul(weight)
    if prepacked is None:
        pytest.skip("this build of torch has no such product")
    want = torch.nn.functional.linear(x, weight, bias)
    assert relative_error(prepacked(x, bias), want) < FP16_TOLERANCE
    exact = weight.half().float()
    assert relative_error(prepacked(x, None), torch.nn.functional.linear(x, exact)) < 1e-6


def test_prepack_fp16_unrepresentable_weights_return_none() -> None:
    assert make_prepacked_matmul(torch.full((3, 4), 1e5)) is None
    assert make_prepacked_matmul(torch.full((3, 4), 1e-9)) is None
    assert make_prepacked_matmul(torch.zeros(0, 4)) is None


@pytest.mark.usefixtures("forms")
@pytest.mark.parametrize("weights", [16, 8, 4, 3, 2, MIXED_BITS], ids=str)
def test_decode_steps_prepacked_equal_plain(weights: object) -> None:
    small = quantize(decoder(), weights)  # pyright: ignore[reportArgumentType]
    got = run_steps(small)
    assert relative_error(got, run_steps(small, "torch")) < 2e-3
    assert relative_error(got, run_steps(dequantize(small))) < 2e-3


@pytest.mark.usefixtures("forms")
def test_decode_steps_quantized_activations_equal_plain() -> None:
    """Inputs are quantized row by row before a prepacked product, as before a plain one."""
    for group in (32, 128):
        small = quantize(decoder(), 8, group_size=group, activation_bits=8)
        got = run_steps(small)
        assert relative_error(got, run_steps(small, "torch")) < 2e-2


@pytest.mark.usefixtures("forms")
def test_quantized_model_record_prune_save_keep_outputs(tmp_path: Path) -> None:
    small = quantize(decoder(tied=True), 16)
    before = run_steps(small)
    with hw.record(small):
        assert torch.equal(run_steps(small), before)
    again = hw.load(small.save(tmp_path / "small"))
    assert torch.equal(run_steps(again), before)  # pyright: ignore[reportArgumentType]
    assert weight_footprints(small)[-1].nbytes == small.spec.weight_bytes()
    pruned = small.prune("0.1,1.2")
    assert relative_error(run_steps(pruned), run_steps(dequantize(pruned))) < 2e-3
    assert weight_footprints(pruned)[-1].nbytes == pruned.spec.weight_bytes()


@pytest.mark.usefixtures("forms")
def test_prepacked_weights_modified_are_repacked() -> None:
    small = quantize(decoder(), 8)
    before = run_steps(small)
    with torch.no_grad():
        small.blocks[0].mlp.up.get_buffer("scales8").mul_(3)  # pyright: ignore
    assert relative_error(run_steps(small), before) > 1e-2


@pytest.mark.usefixtures("forms")
def test_decode_steps_without_prepacked_product_use_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_layers, "make_prepacked_matmul", lambda weight: None)
    small = quantize(decoder(), 4)
    got = run_steps(small)
    assert torch.allclose(got, run_steps(small, "torch"), rtol=1e-5, atol=1e-5)


def test_quantize_weights_beyond_fp16_raise() -> None:
    model = decoder()
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.mul_(1e7)  # pyright: ignore
    with pytest.raises(hw.HeadwiseError, match="largest 16-bit float"):
        quantize(model, 16)
