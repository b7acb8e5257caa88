"""Every function on models in bfloat16 and float16, and under autocast, compared with float32.

A model in half precision is compared with the same rounded weights in float32. The bound is a number of rounding errors of
the dtype (`UNITS` times eps) times the largest number of the result that is not a count. Results with numbers that jump when
two heads or two weights are nearly equal (argmax, ranks, chosen heads) are compared by their shape and by where they are
finite; `tests/analysis/test_half_precision.py` bounds the metrics of a profile one by one.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from tests.contract.attached_models import NATIVE, TOKENIZER, batch, build_model, logits, sample_heads
from tests.contract.functions import FUNCTIONS, flatten_numbers
from tests.contract.public_calls import PUBLIC_CALLS

MODELS = ("decoder", "llama", "encoder", "encoder-decoder", "gpt2", "bert", "bart")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
MODES = (*DTYPES, *(f"autocast {name}" for name in DTYPES))
UNITS = 16
JUMPING = {
    "profile", "profile, prompts", "HeadHistory", "compare_heads", "linear_probe", "sensitivity",
    "coreference", "report", "prune_study", "curve", "plan_streaming", "allocate_bits", "generate, sampled", "describe",
    "find_circuit",
}  # fmt: skip
SLOW = {
    "profile",
    "profile, prompts",
    "importance, resample",
    "report",
    "prune_study",
    "HeadHistory",
    "curve",
}
# Each function once in the fast tests, on alternating models and in alternating modes; the modes meet every model.
SAMPLE = {
    (MODELS[index % 2], function, MODES[index // 2 % len(MODES)])
    for index, function in enumerate(name for name in FUNCTIONS if name not in SLOW)
}

# Calls that compare with results in the dtype of the weights, train, or generate.
AUTOCAST_SAMPLE = {
    (MODELS[index % 2], call, MODES[2 + index // 2 % 2])
    for index, call in enumerate(("explain", "explain", "fold_steering", "fold_steering", "train", "generate, sampled"))
}


def make_model(name: str, dtype: torch.dtype | None = None, *, wide: bool = False) -> Any:
    """Return a model in float32, in a dtype, or (`wide`) in float32 with weights rounded to the dtype."""
    inner = build_model(name).float()
    if dtype is not None:
        inner = inner.to(dtype).float() if wide else inner.to(dtype)
    if name not in NATIVE:
        inner.tie_weights()
        return hw.attach(inner, TOKENIZER)
    inner.tokenizer = TOKENIZER
    return inner


def numbers(function: str, model: Any, name: str) -> np.ndarray | str:
    """Return the numbers of a call, or its error."""
    try:
        return np.array(flatten_numbers((FUNCTIONS | PUBLIC_CALLS)[function](model, name)))
    except HeadwiseError as error:
        return str(error)


@cache
def expected_numbers(name: str, function: str, dtype: torch.dtype | None) -> np.ndarray | str:
    return numbers(function, make_model(name, dtype, wide=True), name)


def cases() -> list[Any]:
    return [
        pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow)
        for case in ((name, function, mode) for name in MODELS for function in FUNCTIONS for mode in MODES)
    ]


def autocast_cases() -> list[Any]:
    """Calls of public functions under autocast. onnxruntime does not depend on autocast, and its export takes long."""
    cases = ((name, call, mode) for name in MODELS[:2] for call in PUBLIC_CALLS for mode in MODES[2:])
    return [
        pytest.param(*case, marks=() if case in AUTOCAST_SAMPLE else pytest.mark.slow)
        for case in cases
        if case[1] != "export, onnx"
    ]


@pytest.mark.parametrize(("name", "function", "mode"), [*cases(), *autocast_cases()])
def test_function_in_half_precision_equals_float32(name: str, function: str, mode: str) -> None:
    is_autocast, dtype = mode.startswith("autocast"), DTYPES[mode.removeprefix("autocast ")]
    want = expected_numbers(name, function, None if is_autocast else dtype)
    model = make_model(name, None if is_autocast else dtype)
    with torch.autocast("cpu", dtype) if is_autocast else nullcontext():
        got = numbers(function, model, name)
    if isinstance(want, str) or isinstance(got, str):
        assert got == want
        return
    assert got.shape == want.shape
    assert (np.isfinite(got) == np.isfinite(want)).all()
    if function == "scan":  # heads with nearly equal effects change places
        got, want = np.sort(got), np.sort(want)
    if function not in JUMPING:
        got, want = np.nan_to_num(got), np.nan_to_num(want)
        size = np.abs(want[want != np.round(want)]).max(initial=1.0)
        np.testing.assert_allclose(got, want, rtol=0, atol=UNITS * torch.finfo(dtype).eps * size)


@pytest.mark.parametrize("name", MODELS[:2])
def test_training_step_under_autocast_equals_float32(name: str) -> None:
    def gradients(dtype: torch.dtype | None) -> torch.Tensor:
        model, inputs = make_model(name), batch(name, "right")
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            loss = model(**inputs)[inputs["attention_mask"]].float().log_softmax(-1)[..., 3].mean()
        loss.backward()
        return torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])

    want, got = gradients(None), gradients(torch.bfloat16)
    assert want.dtype == got.dtype == torch.float32
    assert (got - want).norm() <= UNITS * torch.finfo(torch.bfloat16).eps * want.norm()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_recording_in_half_precision_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    model, inputs = make_model(name, dtype), batch(name, "right")
    plain = logits(model, inputs)
    with hw.record(model, "*"):
        assert torch.equal(logits(model, inputs), plain)
    assert plain.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_silenced_head_in_half_precision_equals_zero_weights(name: str, dtype: torch.dtype) -> None:
    """Both add exact zeros to sums of otherwise equal products."""
    model, inputs = make_model(name, dtype), batch(name)
    head = sample_heads(model)[0]
    with model.heads[head].silenced():
        silenced = logits(model, inputs)
    with torch.no_grad():
        model.heads[head].W_O.zero_()
    torch.testing.assert_close(silenced, logits(model, inputs), rtol=0, atol=0)
