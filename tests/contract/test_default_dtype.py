"""Results do not depend on `torch.set_default_dtype`: statistics and tables are created in float32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.heads.learned_gates import LearnedGates
from headwise.kernels.positions import alibi_slopes, rotary_frequencies
from headwise.kernels.quantization import dequantize
from headwise.spec import LayerAddress
from tests.contract.attached_models import TEXTS
from tests.contract.functions import FUNCTIONS, flatten_numbers
from tests.contract.public_calls import PUBLIC_CALLS
from tests.contract.test_precision import make_model

LONGROPE = hw.RotaryScaling("longrope", 2.0, original_context=4, short_factors=(1.1, 1.3), long_factors=(2.1, 7.3))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def decode(model: Any) -> Tensor:
    """Generate with products that are chosen by their time."""
    return model.generate(torch.tensor([[3, 5, 7]]), max_new_tokens=4)


def scaled(model: Any) -> Tensor:
    with model.heads["1.1"].scaled(0.3), torch.no_grad():
        return model(torch.tensor([[3, 5, 7]]))


TABLES: dict[str, Callable[[], Tensor]] = {
    "ALiBi": lambda: alibi_slopes(6),
    "longrope": lambda: rotary_frequencies(hw.Rotary(scaling=LONGROPE), 4, torch.device("cpu"), 9),
    "gates": lambda: LearnedGates({LayerAddress("", 0): 3}, initial_log_alpha=0.3).log_alpha.detach(),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "generate": decode,
    "scaled": scaled,
    "quantize": lambda model: FUNCTIONS["quantize"](model, "decoder"),
    "importance, gradient": lambda model: FUNCTIONS["importance, gradient"](model, "decoder"),
    "linear_probe": lambda model: FUNCTIONS["linear_probe"](model, "decoder"),
    "profile": lambda model: hw.profile(model, TEXTS, causal=False).metric("local"),
    "find_steering": lambda model: PUBLIC_CALLS["find_steering"](model, "decoder"),
    "TokenizedCorpus": lambda model: PUBLIC_CALLS["TokenizedCorpus"](model, "decoder"),
}
SLOW = {"linear_probe", "profile", "find_steering"}
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)


@each_dtype
@pytest.mark.parametrize("table", TABLES)
def test_table_with_other_default_dtype_has_same_bits(table: str, dtype: torch.dtype) -> None:
    expected = TABLES[table]()
    with default_dtype(dtype):
        result = TABLES[table]()
    assert result.dtype == torch.float32
    assert torch.equal(result, expected)


@each_dtype
def test_dequantize_with_other_default_dtype_is_float32_product(dtype: torch.dtype) -> None:
    codes, scales = torch.tensor([[-127, 3, 64]], dtype=torch.int8), torch.tensor([[0.7]])
    expected = torch.tensor([[-0.7, 3 / 127 * 0.7, 64 / 127 * 0.7]])
    with default_dtype(dtype):
        result = dequantize(codes, scales, 8, 3, torch.float32)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        pytest.param(call, dtype, marks=() if dtype == torch.bfloat16 and call not in SLOW else pytest.mark.slow)
        for call in CALLS
        for dtype in (torch.bfloat16, torch.float64)
    ],
)
def test_call_with_other_default_dtype_gives_same_numbers(
    call: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWISE_MATMUL", "measured")
    expected = flatten_numbers(CALLS[call](make_model("decoder")))
    model = make_model("decoder")
    with default_dtype(dtype):
        result = flatten_numbers(CALLS[call](model))
    assert result
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
