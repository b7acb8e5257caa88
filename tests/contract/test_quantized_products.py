"""Every product of quantized weights in a decode step equals the reference, x Wᵀ + b of the stored numbers.

Prepacked 16-bit weights may differ by FP16_TOLERANCE of the largest number of their row, so an output may differ by that
times Σ|x|. The reference is in float64, so the bound does not depend on the instruction set.
tests/kernels/test_matmul_tuner.py tests products of float32 weights.
"""

import pytest
import torch
from torch import Tensor

from headwise.heads.quantized_layers import QuantizedLinear, QuantizedWeight, try_joint_quantized_linear
from headwise.kernels.matmul_tuner import AUTOTUNED, MatmulTuner
from headwise.kernels.prepacked_fp16 import FP16_TOLERANCE, PREPACKERS, make_prepacked_matmul
from headwise.spec.weight_bits import FULL_PRECISION

ROWS = (1, 2, 7, 16)
SIZES = ((31, 17), (64, 96), (1, 5), (97, 33))  # outputs, inputs
BITS = (16, 8, 4, 3, 2)


def reference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def random_inputs(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs)
    return tuple(torch.randn(*size, generator=generator) for size in ((1, rows, inputs), (outputs, inputs), (outputs,)))  # pyright: ignore


def assert_within(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check that a product is within FP16_TOLERANCE and the error of float32 sums."""
    want = reference_linear(x, weight, bias)
    allowed = FP16_TOLERANCE * x.double().abs().sum(-1, keepdim=True) * weight.double().abs().amax(1)
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert ((got - want).abs() <= allowed + 1e-5 * want.abs().max()).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("operator", PREPACKERS)
@torch.no_grad()
def test_prepacked_fp16_operator_equals_reference(
    operator: str, size: tuple[int, int], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = {operator: PREPACKERS[operator]}
    monkeypatch.setattr("headwise.kernels.prepacked_fp16.PREPACKERS", only)
    for rows in ROWS:
        x, weight, bias = random_inputs(rows, *size)
        layer = quantized_layer(weight[None], bits)
        prepacked = make_prepacked_matmul(layer.dequantize()[0])
        if prepacked is None:
            pytest.skip(f"this build of torch has no {operator} product at 16 bits")
        for added in (None, bias):
            assert_within(prepacked(x, added), x, layer.dequantize()[0], added)
        strided = torch.cat((x, x), -1)[..., ::2]  # noncontiguous
        assert_within(prepacked(strided, None), strided, layer.dequantize()[0], None)


@pytest.mark.parametrize("activation_bits", [FULL_PRECISION, 8])
@pytest.mark.parametrize("bits", BITS)
@torch.no_grad()
def test_decode_step_quantized_weights_equal_reference(bits: int, activation_bits: int) -> None:
    """Through the public module: one weight, three weights at once, and many rows, which use the plain product bitwise."""
    tuner = MatmulTuner(AUTOTUNED)
    x, weight, bias = random_inputs(3, 64, 96)
    layer = quantized_layer(weight[None], bits, activation_bits)
    others = tuple(quantized_layer(weight[None, :rows], bits, activation_bits) for rows in (64, 31, 31))
    with tuner.decode_step(layer, 3):
        got, joint = layer.matmul(x, bias), try_joint_quantized_linear(others, x)
    quantized_input = layer.fake_quantize_input(x)
    assert_within(got, quantized_input, layer.dequantize()[0], bias)
    if joint is not None:
        assert_within(joint, quantized_input, torch.cat([other.dequantize()[0] for other in others]), None)
    prefill = torch.randn(1, 17, 96)
    with tuner.decode_step(layer, 17):
        assert try_joint_quantized_linear(others, prefill) is None
        assert torch.equal(
            layer.matmul(prefill, bias),
            torch.nn.functional.linear(layer.fake_quantize_input(prefill), layer.dequantize()[0], bias),
        )


def quantized_layer(weight: Tensor, bits: int, activation_bits: int = FULL_PRECISION) -> QuantizedWeight:
    """Return the stored weight, (1, out, in)."""
    with torch.device("meta"):
        layer = QuantizedLinear(weight.shape[2], weight.shape[1], False, bits, activation_bits=activation_bits)
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(layer.quantize_to_buffers(weight))
    return layer
