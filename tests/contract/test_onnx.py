"""The node tests of the ONNX `Attention` operator, run on every backend that supports the call.

Inputs and outputs come from the `onnx` package (https://onnx.ai/onnx/operators/onnx__Attention.html), so the expected values
are independent of headwise. The adapter below converts the attributes and inputs of the operator to our arguments.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.backend.test.case import node as operators
from torch import Tensor

from headwise.kernels import (
    BACKENDS,
    Mask,
    ScoreParams,
    attention_weights,
    causal,
    make_score_params,
    padding_mask,
    run_kernel,
    window,
)
from headwise.kernels.score_params import add_bias_and_mask, raw_scores, repeat_kv

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:onnx.*", "ignore::DeprecationWarning:onnx.*")

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


@dataclass(frozen=True)
class NodeCase:
    """One node test: attributes, and input and output arrays by their names in the operator specification."""

    name: str
    attributes: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    rtol: float
    atol: float


@cache
def node_cases() -> dict[str, NodeCase]:
    """Return the tests of the operator itself. The expanded tests define it by other operators."""
    with pytest.MonkeyPatch.context() as patch:  # otherwise it would create and discard the tests of all operators
        patch.setattr(operators, "import_recursive", lambda package: import_module(f"{package.__name__}.attention"))
        collected = operators.collect_testcases("Attention")
    by_case_name = {}
    for case in collected:
        if "expanded" in case.name:
            continue
        assert case.model is not None
        assert case.data_sets is not None
        (node,) = case.model.graph.node
        ((inputs, outputs),) = case.data_sets
        by_case_name[case.name] = NodeCase(
            case.name,
            {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute},
            name_arrays(INPUTS, node.input, inputs),
            name_arrays(OUTPUTS, node.output, outputs),
            case.rtol,
            case.atol,
        )
    return by_case_name


def name_arrays(slots: tuple[str, ...], used: Any, arrays: Any) -> dict[str, Tensor]:
    """Return arrays by name. Omitted inputs of a node have no array; the slots of the node show which inputs these are."""
    present = [slot for slot, name in zip(slots, used, strict=False) if name]
    return {slot: to_torch(array) for slot, array in zip(present, arrays, strict=True)}


def to_torch(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":  # numpy's bfloat16 is an extension that torch does not support
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))


# The adapter from a node to q, k, v and score params.


@dataclass(frozen=True)
class AdaptedCall:
    """A case as a call of our kernels. k and v include the past."""

    q: Tensor
    k: Tensor
    v: Tensor
    params: ScoreParams


def to_kernel_call(case: NodeCase) -> AdaptedCall:
    inputs, attributes = case.inputs, case.attributes
    q = split_heads(inputs["Q"], attributes.get("q_num_heads"))
    k = split_heads(inputs["K"], attributes.get("kv_num_heads"))
    v = split_heads(inputs["V"], attributes.get("kv_num_heads"))
    if "past_key" in inputs:
        k, v = torch.cat((inputs["past_key"], k), 2), torch.cat((inputs["past_value"], v), 2)
    masks, bias = masks_and_bias(case, q.shape[2], k.shape[2])
    mask = masks[0] if masks else None
    for other in masks[1:]:
        mask = mask & other  # pyright: ignore[reportOptionalOperand]
    softcap = attributes.get("softcap") or None  # 0 means no softcap
    params = make_score_params(q, k, v, mask=mask, bias=bias, softcap=softcap, scale=attributes.get("scale"))
    return AdaptedCall(q, k, v, params)


def split_heads(x: Tensor, heads: int | None) -> Tensor:
    """Split heads if their number is given: (B, T, heads·d) → (B, heads, T, d)."""
    return x if heads is None else x.unflatten(-1, (heads, -1)).transpose(1, 2)


def masks_and_bias(case: NodeCase, T: int, S: int) -> tuple[list[Mask], Tensor | None]:
    """Return everything that hides keys as masks, and the bias of the scores."""
    inputs, attributes = case.inputs, case.attributes
    masks, bias = [], None
    if "attn_mask" in inputs:
        attn_mask = inputs["attn_mask"]
        fill = (
            False if attn_mask.dtype == torch.bool else -torch.inf
        )  # the operator's mask may have fewer columns than keys
        attn_mask = torch.nn.functional.pad(attn_mask, (0, S - attn_mask.shape[-1]), value=fill)
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]  # broadcasts from the right: three axes are (heads, T, S)
        if attn_mask.dtype == torch.bool:
            masks.append(Mask.of(attn_mask))
        else:
            bias = attn_mask
    lengths = inputs.get("nonpad_kv_seqlen")
    if lengths is not None:
        masks.append(padding_mask(torch.arange(S) < lengths[:, None]))
        # Examples have different offsets, which our causal and window masks do not support, so masks are dense.
        offsets = [int(length) - T for length in lengths]
        planes = [position_masks(attributes, offset) for offset in offsets]
        masks += [Mask.of(torch.cat([mask.dense(T, S) for mask in row])) for row in zip(*planes, strict=True)]
    else:
        past = inputs["past_key"].shape[2] if "past_key" in inputs else 0
        masks += position_masks(attributes, past)
    return masks, bias


def position_masks(attributes: dict[str, Any], offset: int) -> list[Mask]:
    """Return masks for a position of the first query. −1 means no limit on one side of a window."""
    masks = [causal(offset)] if attributes.get("is_causal") else []
    left, right = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    if left >= 0 or right >= 0:
        far = 10**6
        masks.append(window(left + 1 if left >= 0 else far, right if right >= 0 else far, offset))
    return masks


def operator_scores(call: AdaptedCall, mode: int) -> Tensor:
    """Return the fourth output of the operator: 0 and 1 scaled (and capped) products, 2 with bias and mask, 3 the weights."""
    T, S = call.q.shape[2], call.k.shape[2]
    if mode == 3:
        return attention_weights(call.q, call.k, call.params)
    raw = raw_scores(call.q, repeat_kv(call.k, call.params.kv_of_head), call.params)
    return raw if mode < 2 else add_bias_and_mask(raw, call.params, range(T), range(S), T, S)


def check(case: NodeCase, output_name: str, got: Tensor) -> None:
    """Compare with the tolerances of the case. For bfloat16 two units in the last place, as in the runner of onnx."""
    want = case.outputs[output_name]
    assert got.dtype == want.dtype
    rtol = max(case.rtol, 2**-6) if want.dtype == torch.bfloat16 else case.rtol
    np.testing.assert_allclose(
        got.double().numpy(), want.double().numpy(), rtol=rtol, atol=case.atol, err_msg=output_name
    )


NAMES = sorted(node_cases())


RUNS = [  # every case on every backend that supports it; the fused kernel does not support a softcap
    (name, backend)
    for name, backend in product(NAMES, BACKENDS)
    if backend != "fused" or not node_cases()[name].attributes.get("softcap")
]


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_kernel_onnx_node_gives_expected_output(name: str, backend: str) -> None:
    case = node_cases()[name]
    got = run_node(case, backend)
    try:
        check(case, "Y", got)
    except AssertionError:
        if got.dtype not in (torch.float16, torch.bfloat16):
            raise
        check_closer_to_float64(case, got)


def run_node(case: NodeCase, backend: str) -> Tensor:
    call = to_kernel_call(case)
    z = run_kernel(call.q, call.k, call.v, call.params, backend)  # (B, H, T, e)
    return z if case.inputs["Q"].ndim == 4 else z.transpose(1, 2).flatten(2)


def check_closer_to_float64(case: NodeCase, got: Tensor) -> None:
    """If two half-precision results differ by more than the tolerance, require that ours is closer to float64."""
    doubles = {name: x.double() if x.is_floating_point() else x for name, x in case.inputs.items()}
    exact = run_node(replace(case, inputs=doubles), "reference")
    own_error, reference_error = got.double() - exact, case.outputs["Y"].double() - exact
    assert got.dtype == case.outputs["Y"].dtype
    assert own_error.abs().max() <= reference_error.abs().max()
    assert own_error.norm() <= reference_error.norm()


def test_check_closer_to_float64_wrong_output_fails() -> None:
    case = node_cases()["test_attention_4d_fp16"]
    check_closer_to_float64(case, case.outputs["Y"])
    for wrong in (case.outputs["Y"] * 1.002, torch.full_like(case.outputs["Y"], torch.nan)):
        with pytest.raises(AssertionError):
            check_closer_to_float64(case, wrong)


@pytest.mark.parametrize("name", [name for name in NAMES if "present_key" in node_cases()[name].outputs])
def test_onnx_node_past_gives_expected_present(name: str) -> None:
    case = node_cases()[name]
    call = to_kernel_call(case)
    check(case, "present_key", call.k)
    check(case, "present_value", call.v)


@pytest.mark.parametrize("name", [name for name in NAMES if "qk_matmul_output" in node_cases()[name].outputs])
def test_operator_scores_onnx_node_match_matmul_output(name: str) -> None:
    case = node_cases()[name]
    check(
        case, "qk_matmul_output", operator_scores(to_kernel_call(case), case.attributes.get("qk_matmul_output_mode", 0))
    )


def test_onnx_nodes_all_are_collected() -> None:
    assert len(NAMES) == 93
