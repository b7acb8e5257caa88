"""The ONNX `Attention` operator's own node tests, run on every backend that takes the call.

https://onnx.ai/onnx/operators/onnx__Attention.html: inputs and outputs come from the `onnx` package, so nothing of ours
decides what is right. The adapter below says in our words what the operator's attributes and inputs say in its own.
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

from headwise.kernels import BACKENDS, Mask, Terms, causal, make_terms, maps, padding_mask, run, window
from headwise.kernels.score_params import raw_scores, spread, visible_scores

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:onnx.*", "ignore::DeprecationWarning:onnx.*")

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


@dataclass(frozen=True)
class Case:
    """One node test: attributes, and input and output arrays by the names of the operator's text."""

    name: str
    attributes: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    rtol: float
    atol: float


@cache
def cases() -> dict[str, Case]:
    """Those for the operator itself; the expanded ones test its definition by other operators."""
    with pytest.MonkeyPatch.context() as patch:  # it would make the tests of every operator, and throw them away
        patch.setattr(operators, "import_recursive", lambda package: import_module(f"{package.__name__}.attention"))
        collected = operators.collect_testcases("Attention")
    found = {}
    for case in collected:
        if "expanded" in case.name:
            continue
        assert case.model is not None
        assert case.data_sets is not None
        (node,) = case.model.graph.node
        ((inputs, outputs),) = case.data_sets
        found[case.name] = Case(
            case.name,
            {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute},
            by_name(INPUTS, node.input, inputs),
            by_name(OUTPUTS, node.output, outputs),
            case.rtol,
            case.atol,
        )
    return found


def by_name(slots: tuple[str, ...], used: Any, arrays: Any) -> dict[str, Tensor]:
    """Arrays come without a place for what a node leaves out; its slots say which those are."""
    present = [slot for slot, name in zip(slots, used, strict=False) if name]
    return {slot: to_torch(array) for slot, array in zip(present, arrays, strict=True)}


def to_torch(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":  # numpy's is an extension that torch does not know
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))


# The adapter, from what a node says to q, k, v and our terms.


@dataclass(frozen=True)
class Adapted:
    """A case as a call of our kernels, k and v with their past."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms


def adapt(case: Case) -> Adapted:
    given, attributes = case.inputs, case.attributes
    q = split_heads(given["Q"], attributes.get("q_num_heads"))
    k = split_heads(given["K"], attributes.get("kv_num_heads"))
    v = split_heads(given["V"], attributes.get("kv_num_heads"))
    if "past_key" in given:
        k, v = torch.cat((given["past_key"], k), 2), torch.cat((given["past_value"], v), 2)
    masks, bias = where_to_look(case, q.shape[2], k.shape[2])
    mask = masks[0] if masks else None
    for other in masks[1:]:
        mask = mask & other  # pyright: ignore[reportOptionalOperand]
    softcap = attributes.get("softcap") or None  # the operator writes 0 for none
    terms = make_terms(q, k, v, mask=mask, bias=bias, softcap=softcap, scale=attributes.get("scale"))
    return Adapted(q, k, v, terms)


def split_heads(x: Tensor, heads: int | None) -> Tensor:
    """(B, T, heads·d) → (B, heads, T, d), where heads are given."""
    return x if heads is None else x.unflatten(-1, (heads, -1)).transpose(1, 2)


def where_to_look(case: Case, T: int, S: int) -> tuple[list[Mask], Tensor | None]:
    """Everything that hides keys, as masks, and what is added to the scores."""
    given, attributes = case.inputs, case.attributes
    masks, bias = [], None
    if "attn_mask" in given:
        shown = given["attn_mask"]
        hidden = False if shown.dtype == torch.bool else -torch.inf  # the operator's mask may stop short of the keys
        shown = torch.nn.functional.pad(shown, (0, S - shown.shape[-1]), value=hidden)
        shown = shown[(None,) * (4 - shown.ndim)]  # broadcast from the right: three axes are (heads, T, S)
        if shown.dtype == torch.bool:
            masks.append(Mask.of(shown))
        else:
            bias = shown
    lengths = given.get("nonpad_kv_seqlen")
    if lengths is not None:
        masks.append(padding_mask(torch.arange(S) < lengths[:, None]))
        # Each batch row has a place of its own, which our causal and window masks have not: one dense plane each.
        offsets = [int(length) - T for length in lengths]
        planes = [place_masks(attributes, offset) for offset in offsets]
        masks += [Mask.of(torch.cat([mask.dense(T, S) for mask in row])) for row in zip(*planes, strict=True)]
    else:
        past = given["past_key"].shape[2] if "past_key" in given else 0
        masks += place_masks(attributes, past)
    return masks, bias


def place_masks(attributes: dict[str, Any], offset: int) -> list[Mask]:
    """Masks that know where the first query stands. −1 leaves a side of a window open."""
    masks = [causal(offset)] if attributes.get("is_causal") else []
    left, right = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    if left >= 0 or right >= 0:
        far = 10**6
        masks.append(window(left + 1 if left >= 0 else far, right if right >= 0 else far, offset))
    return masks


def scores(call: Adapted, mode: int) -> Tensor:
    """The operator's fourth output: 0 and 1 scaled (and capped) products, 2 with bias and mask, 3 the weights."""
    T, S = call.q.shape[2], call.k.shape[2]
    if mode == 3:
        return maps(call.q, call.k, call.terms)
    raw = raw_scores(call.q, spread(call.k, call.terms.groups), call.terms)
    return raw if mode < 2 else visible_scores(raw, call.terms, range(T), range(S), T, S)


def check(case: Case, what: str, got: Tensor) -> None:
    """By the case's own tolerances; bfloat16 by the two units in the last place that onnx's own runner grants it."""
    want = case.outputs[what]
    assert got.dtype == want.dtype
    rtol = max(case.rtol, 2**-6) if want.dtype == torch.bfloat16 else case.rtol
    np.testing.assert_allclose(got.double().numpy(), want.double().numpy(), rtol=rtol, atol=case.atol, err_msg=what)


NAMES = sorted(cases())


RUNS = [  # every case on every backend that takes it; a capped one is refused by fused, as test_kernels.py says
    (name, backend)
    for name, backend in product(NAMES, BACKENDS)
    if backend != "fused" or not cases()[name].attributes.get("softcap")
]


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_what_is_attended_to(name: str, backend: str) -> None:
    case = cases()[name]
    got = attended(case, backend)
    try:
        check(case, "Y", got)
    except AssertionError:
        if got.dtype not in (torch.float16, torch.bfloat16):
            raise
        check_nearer(case, got)


def attended(case: Case, backend: str) -> Tensor:
    call = adapt(case)
    z = run(call.q, call.k, call.v, call.terms, backend)  # (B, H, T, e)
    return z if case.inputs["Q"].ndim == 4 else z.transpose(1, 2).flatten(2)


def check_nearer(case: Case, got: Tensor) -> None:
    """Two ways to compute in half precision may lie farther apart than the tolerance: then by who is nearer to float64."""
    doubles = {name: x.double() if x.is_floating_point() else x for name, x in case.inputs.items()}
    exact = attended(replace(case, inputs=doubles), "reference")
    ours, numpys = got.double() - exact, case.outputs["Y"].double() - exact
    assert got.dtype == case.outputs["Y"].dtype
    assert ours.abs().max() <= numpys.abs().max()
    assert ours.norm() <= numpys.norm()


def test_who_is_nearer_to_float64_can_be_lost() -> None:
    case = cases()["test_attention_4d_fp16"]
    check_nearer(case, case.outputs["Y"])
    for wrong in (case.outputs["Y"] * 1.002, torch.full_like(case.outputs["Y"], torch.nan)):
        with pytest.raises(AssertionError):
            check_nearer(case, wrong)


@pytest.mark.parametrize("name", [name for name in NAMES if "present_key" in cases()[name].outputs])
def test_past_and_present(name: str) -> None:
    case = cases()[name]
    call = adapt(case)
    check(case, "present_key", call.k)
    check(case, "present_value", call.v)


@pytest.mark.parametrize("name", [name for name in NAMES if "qk_matmul_output" in cases()[name].outputs])
def test_scores_and_maps(name: str) -> None:
    case = cases()[name]
    check(case, "qk_matmul_output", scores(adapt(case), case.attributes.get("qk_matmul_output_mode", 0)))


def test_all_cases_are_here() -> None:
    assert len(NAMES) == 93
