"""Products of 8-bit codes equal the closed form s · t · Σ a b, and those of dequantized numbers, up to float32 rounding."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.heads import quantized_layers
from headwise.kernels import int8_matmul as int8_module
from headwise.kernels.int8_matmul import int8_matmul, make_dynamic_int8_matmul, make_int8_matmul
from headwise.kernels.matmul_tuner import AUTOTUNED, MatmulTuner
from headwise.kernels.quantization import dequantize, quantize
from headwise.kernels.rounding_tolerance import to_float64

ROWS = (1, 2, 7, 16)
SIZES = ((31, 17), (64, 96), (1, 5), (97, 33), (5, 2))  # outputs, inputs
# The step of x, x / step, the sum as a float, two multiplications and the bias round once each. Rounding x / step does not
# matter unless it changes a code, which the references below repeat.
ROUNDING = 8 * torch.finfo(torch.float32).eps

needs_int8 = pytest.mark.skipif(
    make_int8_matmul(torch.ones(2, 2, dtype=torch.int8), torch.ones(2)) is None,
    reason="this CPU or build of torch has no such product",
)


def random_product(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)  # pyright: ignore[reportReturnType]


def expected_product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return s · t · Σ a b + bias in float64, and the sum of the absolute values of both terms."""
    x_codes, x_scales = quantize(x, 8, x.shape[-1])
    product = to_float64(x_codes) @ to_float64(codes).T * (to_float64(x_scales) / 127) * (to_float64(scales) / 127)
    added = torch.zeros(len(codes)) if bias is None else bias
    return product + added.double(), product.abs() + added.double().abs()


@needs_int8
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_int8_matmul_any_shape_equals_closed_form(size: tuple[int, int], rows: int) -> None:
    x, weight, bias = random_product(rows, *size)
    codes, scales = quantize(weight, 8, size[1])
    product = make_int8_matmul(codes, scales[:, 0])
    assert product is not None
    for added in (None, bias):
        got = product(x, added)
        want, magnitude = expected_product(x, codes, scales[:, 0], added)
        assert got.dtype == torch.float32
        assert got.shape == want.shape
        assert ((got - want).abs() <= ROUNDING * magnitude).all()
    strided = torch.cat((x, x), -1)[None, :, ::2]  # three axes, noncontiguous
    want, magnitude = expected_product(strided, codes, scales[:, 0], None)
    assert ((product(strided, None) - want).abs() <= ROUNDING * magnitude).all()


@needs_int8
def test_int8_matmul_row_of_zeros_and_extreme_codes() -> None:
    x = torch.tensor([[0.0, 0.0, 0.0], [1e-20, -1e-20, 1e-20], [3e30, -3e30, 3e30]])
    got = int8_matmul(x, torch.tensor([[127, -127, 127]], dtype=torch.int8), torch.tensor([2.0]) / 127, None)
    assert torch.allclose(got, torch.tensor([[0.0], [6e-20], [1.8e31]]), rtol=1e-6, atol=0)


def test_int8_matmul_unsupported_weights_return_none() -> None:
    assert make_int8_matmul(torch.ones(3, 1, dtype=torch.int8), torch.ones(3)) is None
    assert make_int8_matmul(torch.ones(0, 4, dtype=torch.int8), torch.ones(0)) is None


def decoder(**fields: object) -> hw.Transformer:
    torch.manual_seed(0)
    attention = hw.AttentionSpec(width=24, heads=4, kv_heads=2, head_dim=10, rotary=hw.Rotary())
    options = {"mlp_width": 51, "mlp_bias": False, "norm": "rms", "activation": "swiglu", **fields}
    model = hw.Transformer(hw.ModelSpec(vocab=35, context=40, layers=2, attention=attention, **options)).eval()  # pyright: ignore
    model.matmul_tuner = MatmulTuner(AUTOTUNED)
    return model


@torch.no_grad()
def decode(model: hw.Transformer) -> Tensor:
    cache = model.cache()
    return torch.cat(
        [model(token, cache=cache) for token in torch.tensor([[3, 30, 0, 7], [1, 2, 5, 9]]).split(1, 1)], 1
    )


@needs_int8
@pytest.mark.parametrize("tied", [True, False])
def test_decode_steps_w8a8_with_row_scales_equal_dequantized(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a model: q, k, v, MLP and vocabulary use 8-bit codes; W_O, whose scales are per head, does not."""
    packed, original = [], quantized_layers.make_int8_matmul
    monkeypatch.setattr(
        quantized_layers,
        "make_int8_matmul",
        lambda codes, scales: packed.append(codes.shape) or original(codes, scales),
    )
    small = hw.quantize(decoder(tied=tied), 8, group_size=64, activation_bits=8)
    got = decode(small)
    assert sorted(packed) == sorted([(80, 24), (102, 24), (24, 51)] * 2 + [(35, 24)])
    small.matmul_tuner = MatmulTuner("torch")  # dequantizes and multiplies
    # W_O as 16-bit floats moves its outputs by up to 2⁻¹⁰, which may move a code of a later input by one step of 1/127
    assert (got - decode(small)).norm() < 1e-2 * got.norm()


@needs_int8
@pytest.mark.parametrize(
    "options", [{"group_size": 16}, {"group_size": 64, "activation_bits": 32}, {"group_size": 64}], ids=str
)
def test_decode_steps_without_row_scales_or_8_bit_inputs_use_other_product(
    options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes are multiplied only if inputs have 8 bits and each row of the weight has one scale."""
    packed: list[object] = []
    monkeypatch.setattr(quantized_layers, "make_int8_matmul", lambda codes, scales: packed.append(codes))
    decode(hw.quantize(decoder(), 8, **{"activation_bits": 8, **options}))
    assert bool(packed) == (options == {"group_size": 64})


def test_decode_steps_inexact_operator_uses_other_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """If sums overflow, as on CPUs that add codes in 16 bits, or the operator is missing, the 16-bit product runs."""
    small = hw.quantize(decoder(), 8, group_size=64, activation_bits=8)
    want = decode(small)
    for operator in (lambda a, b: (a.int() @ b.int()).clamp(max=2**15 - 1), None):
        int8_module.is_int8_matmul_exact.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_int_mm", operator) if operator else patch.delattr(torch, "_int_mm")
            assert make_int8_matmul(torch.ones(2, 2, dtype=torch.int8), torch.ones(2)) is None
            small.matmul_tuner = MatmulTuner(AUTOTUNED)
            assert (decode(small) - want).norm() < 1e-2 * want.norm()
    int8_module.is_int8_matmul_exact.cache_clear()


@needs_int8
def test_int8_matmul_rounds_inputs_as_quantize() -> None:
    """The codes and steps of x are those of `quantize`, so a product with the identity returns the rounded x."""
    x = torch.randn(5, 9)
    got = int8_matmul(x, (127 * torch.eye(9)).to(torch.int8), torch.full((9,), 1 / 127), None)
    want = dequantize(*quantize(x, 8, 9), 8, 9, torch.float32, 9)
    assert ((got - want).abs() <= ROUNDING * want.abs()).all()


needs_dynamic_int8 = pytest.mark.skipif(
    make_dynamic_int8_matmul(torch.ones(2, 2)) is None, reason="this CPU or build of torch has no such product"
)


@needs_dynamic_int8
@pytest.mark.parametrize("size", [*SIZES, (5, 1)], ids=str)
def test_dynamic_int8_matmul_any_shape_is_within_steps_of_both_factors(size: tuple[int, int]) -> None:
    """Rounding moves each weight by half a step, and each input by at most one: half a step, and half for the offset."""
    x, weight, bias = random_product(1, *size)
    product = make_dynamic_int8_matmul(weight)
    assert product is not None
    x_step = (x.amax().clamp(min=0) - x.amin().clamp(max=0)).double() / 255
    weight_steps = weight.double().abs().amax(1) / 127
    for added in (None, bias):
        want = x.double() @ weight.double().T + (0 if added is None else added)
        moved_inputs = x_step * weight.double().abs().sum(1)
        moved_weights = 0.5 * weight_steps * (x.double().abs() + x_step).sum(1, keepdim=True)
        assert ((product(x, added) - want).abs() <= moved_inputs + moved_weights + 1e-6 * want.abs()).all()
    assert torch.equal(product(torch.zeros(1, size[1]), None), torch.zeros(1, size[0]))


@needs_dynamic_int8
@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4, {"*": 8, "mlp": 16}], ids=str)
def test_tuner_int8_inputs_changes_steps_of_one_token_only(bits: int | dict, tmp_path: Path) -> None:
    small = hw.quantize(decoder(), bits)
    ids, want = torch.tensor([[3, 30, 0, 7]]), decode(small)
    small.matmul_tuner = MatmulTuner(AUTOTUNED, int8_inputs=True)
    assert torch.equal(decode(small), want)  # two rows
    cache = small.cache()
    got = small(ids[:, :3], cache=cache)
    step = small(ids[:, 3:], cache=cache)
    reference = small(ids)
    assert torch.allclose(got, reference[:, :3], atol=1e-2)
    assert 0 < (step - reference[:, 3:]).norm() < 0.1 * reference[:, 3:].norm()
    with hw.record(small):
        cache = small.cache()
        small(ids[:, :3], cache=cache)
        assert torch.equal(small(ids[:, 3:], cache=cache), step)
    assert copy.deepcopy(small).matmul_tuner.int8_inputs
    loaded = hw.load(small.save(tmp_path / "small"))
    assert not loaded.matmul_tuner.int8_inputs  # pyright: ignore


def test_tuner_int8_inputs_unsupported_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.kernels.matmul_tuner.is_dynamic_int8_matmul_exact", lambda: False)
    with pytest.raises(hw.HeadwiseError, match="int8_inputs=True: this CPU"):
        MatmulTuner(int8_inputs=True)
