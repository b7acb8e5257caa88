"""Every public function gives the same numbers on the pretend device as on the CPU, with float64 allowed and forbidden."""

from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from tests.contract.attached_models import NATIVE, TOKENIZER, build_model
from tests.contract.functions import FUNCTIONS, flatten_numbers
from tests.contract.public_calls import EXPENSIVE, PUBLIC_CALLS
from tests.devices.pretend_device import pretend_device

MODELS = ("decoder", "encoder", "encoder-decoder", "llama", "gpt2", "bert")
PAIR = ("decoder", "llama")
CALLS = FUNCTIONS | PUBLIC_CALLS
SLOW = EXPENSIVE | {"curve", "AttentionToPosition"}
# Each call without float64, on alternating models; the selftest runs with float64.
SAMPLE = {(PAIR[index % 2], call, False) for index, call in enumerate(CALLS) if call not in SLOW}
# Calls that only an attached model or an encoder supports run on that.
SAMPLE |= {("llama", call, False) for call in ("per_head_cache", "cached", "quantized", "export, gguf")}
SAMPLE |= {("encoder", "embed", False)}


def run(function: Any, model: Any, name: str) -> list[float] | str:
    """Return the numbers of a call, or its error."""
    try:
        numbers = flatten_numbers(function(model, name))
        assert numbers
        return numbers
    except HeadwiseError as error:
        return str(error)


def cases() -> list[Any]:
    return [
        pytest.param(name, function, float64, marks=() if (name, function, float64) in SAMPLE else pytest.mark.slow)
        for name in MODELS
        for float64 in (True, False)
        for function in CALLS
    ]


def make_model(name: str, device: str) -> Any:
    """Return a float32 model on a device, attached there if it is a transformers model."""
    inner = build_model(name).float().to(device)
    if name not in NATIVE:
        inner.tie_weights()
        return hw.attach(inner, TOKENIZER)
    inner.tokenizer = TOKENIZER
    return inner


def assert_same(result: list[float] | str, expected: list[float] | str) -> None:
    """Compare the numbers of a call, or its errors."""
    if isinstance(expected, str) or isinstance(result, str):
        assert result == expected
        return
    np.testing.assert_allclose(result, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(("name", "function", "float64"), cases())
def test_function_on_device_equals_cpu(name: str, function: str, float64: bool) -> None:
    expected = run(CALLS[function], make_model(name, "cpu"), name)
    with pretend_device(float64=float64):
        result = run(CALLS[function], make_model(name, "pretend"), name)
    assert_same(result, expected)


# Calls with tensors on the host: indices, random probes, masks that are sent to the device later.
DEFAULT_DEVICE_SAMPLE = {
    ("decoder", "explain"), ("decoder", "find_heads"), ("decoder", "HeadHistory"), ("llama", "scan"), ("llama", "to_native"),
    ("llama", "quantized"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "function"),
    [
        pytest.param(name, function, marks=() if (name, function) in DEFAULT_DEVICE_SAMPLE else pytest.mark.slow)
        for name in PAIR
        for function in CALLS
        if function not in EXPENSIVE
    ],
)
def test_function_with_default_device_equals_cpu(name: str, function: str) -> None:
    """After `torch.set_default_device`, tensors that are created without a device lie on the accelerator."""
    expected = run(CALLS[function], make_model(name, "cpu"), name)
    with pretend_device():
        model = make_model(name, "pretend")
        with torch.device("pretend"):
            result = run(CALLS[function], model, name)
    assert_same(result, expected)
