"""Every product of packed weights that a generation step may take is the reference, x Wᵀ + b of the numbers that are stored.

In a form at 16 bits the numbers of a row may each move by HALF_TOLERANCE of the row's largest, so an output by no more than
that times Σ|x|. The reference is computed in float64, so the bound holds whatever the instruction set is. Products of float32
weights are in tests/kernels/test_linear.py.
"""

import pytest
import torch
from torch import Tensor

from headwise.heads.quantized_weights import Packed, PackedLinear, multiplied_as_one
from headwise.kernels.autotuned_linear import SETTING, step
from headwise.kernels.prepacked_fp16 import HALF_TOLERANCE, OPERATORS, half_form
from headwise.spec.weight_bits import FULL

ROWS = (1, 2, 7, 16)
SIZES = ((31, 17), (64, 96), (1, 5), (97, 33))  # outputs, inputs
BITS = (16, 8, 4, 3, 2)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


def drawn(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(rows + outputs)
    return tuple(torch.randn(*size, generator=dice) for size in ((1, rows, inputs), (outputs, inputs), (outputs,)))  # pyright: ignore


def assert_within(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """What HALF_TOLERANCE allows, and float32 sums."""
    want = plain(x, weight, bias)
    allowed = HALF_TOLERANCE * x.double().abs().sum(-1, keepdim=True) * weight.double().abs().amax(1)
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert ((got - want).abs() <= allowed + 1e-5 * want.abs().max()).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
@torch.no_grad()
def test_a_form_is_the_reference(
    operator: str, size: tuple[int, int], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = {operator: OPERATORS[operator]}
    monkeypatch.setattr("headwise.kernels.prepacked_fp16.OPERATORS", only)
    for rows in ROWS:
        x, weight, bias = drawn(rows, *size)
        layer = packed(weight[None], bits)
        form = half_form(layer.unpacked()[0])
        if form is None:
            pytest.skip(f"this build of torch has no {operator} product at 16 bits")
        for added in (None, bias):
            assert_within(form(x, added), x, layer.unpacked()[0], added)
        every_other = torch.cat((x, x), -1)[..., ::2]  # not side by side in memory
        assert_within(form(every_other, None), every_other, layer.unpacked()[0], None)


@pytest.mark.parametrize("activations", [FULL, 8])
@pytest.mark.parametrize("bits", BITS)
@torch.no_grad()
def test_what_a_step_multiplies_by_is_the_reference(
    bits: int, activations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the door a model uses: one weight, three at once, and many rows, which take the plain way bitwise."""
    monkeypatch.setenv(SETTING, "measured")
    x, weight, bias = drawn(3, 64, 96)
    layer = packed(weight[None], bits, activations)
    others = tuple(packed(weight[None, :rows], bits, activations) for rows in (64, 31, 31))
    with step(layer, 3):
        got, joint = layer.product(x, bias), multiplied_as_one(others, x)
    read = layer.as_input(x)
    assert_within(got, read, layer.unpacked()[0], bias)
    if joint is not None:
        assert_within(joint, read, torch.cat([one.unpacked()[0] for one in others]), None)
    many = torch.randn(1, 17, 96)
    with step(layer, 17):
        assert multiplied_as_one(others, many) is None
        assert torch.equal(
            layer.product(many, bias), torch.nn.functional.linear(layer.as_input(many), layer.unpacked()[0], bias)
        )


def packed(weight: Tensor, bits: int, activations: int = FULL) -> Packed:
    """(1, out, in) as it is stored."""
    with torch.device("meta"):
        made = PackedLinear(weight.shape[2], weight.shape[1], False, bits, activations=activations)
    made = made.to_empty(device="cpu")
    made.load_state_dict(made.pack(weight))
    return made
