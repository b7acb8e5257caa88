"""Contract 1: every kernel equals the reference, forward and gradient; and the reference equals what others compute."""

from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headwise.errors import HeadwiseError
from headwise.kernels import Alibi, Buckets, Mask, alibi_slopes, causal, document_mask, padding_mask, per_head, window
from headwise.kernels.batched import maps, maps_of_rows
from headwise.kernels.dispatch import make_terms
from tests.contract.variants import (
    FIXED,
    FLOATS,
    KERNELS,
    TOLERANCE,
    Call,
    assert_close,
    calls,
    oracle,
    run_both_ways,
)

ALL = KERNELS | {"reference": oracle}
each_kernel = pytest.mark.parametrize("name", KERNELS)
each_kernel_and_reference = pytest.mark.parametrize("name", ALL)
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=["float64", "float32"])

# `headwise.kernels.fused` is the function; its module has to be asked for by its path.
fused_module = import_module("headwise.kernels.fused")


def random_call(B: int, H: int, T: int, S: int, d: int = 5, dtype: torch.dtype = torch.float64, **options) -> Call:
    """Plain heads, random numbers, gradients wanted."""
    generator = torch.Generator().manual_seed(1)
    shapes = (B, H, T, d), (B, H, S, d), (B, H, S, d)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return Call(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), **options)


@given(call=calls(), data=st.data())
@FIXED
def test_a_row_of_one_of_the_batch_is_that_of_the_whole_map(call: Call, data: st.DataObject) -> None:
    terms = make_terms(call.q, call.k, call.v, **call.options)
    one, row = (data.draw(st.integers(0, call.q.shape[axis] - 1)) for axis in (0, 2))
    some = slice(one, one + 1)
    got = maps_of_rows(call.q, call.k, terms, range(row, row + 1), some)
    torch.testing.assert_close(got, maps(call.q, call.k, terms)[some, :, row : row + 1], rtol=0, atol=1e-12)


# The reference, against implementations that share no line with it.


def by_the_formula(call: Call) -> np.ndarray:
    """Attention in numpy, one query at a time."""
    q, k, v = (x.detach().numpy() for x in (call.q, call.k, call.v))
    (B, H, T, d), (_, K, S, e) = q.shape, v.shape
    groups = call.groups or [head * K // H for head in range(H)]
    seen = np.ones((B, H, T, S), bool)
    if call.mask is not None:
        seen = call.mask.dense(T, S).expand(B, H, T, S).numpy()
    bias = np.zeros((B, H, T, S))
    if isinstance(call.bias, Tensor):
        bias = np.broadcast_to(call.bias.detach().numpy(), bias.shape)
    elif call.bias is not None:
        places = np.arange(T)[:, None] + S - T
        bias = bias - call.bias.slopes.numpy()[:, None, None] * abs(places - np.arange(S))
    sink = None if call.sink is None else torch.as_tensor(call.sink).detach().expand(H).numpy()

    z = np.zeros((B, H, T, e))
    for b, h, t in np.ndindex(B, H, T):
        scores = k[b, groups[h]] @ q[b, h, t] * (d**-0.5 if call.scale is None else call.scale)
        if call.softcap is not None:
            scores = call.softcap * np.tanh(scores / call.softcap)
        visible = seen[b, h, t] & np.isfinite(bias[b, h, t])
        chances = np.exp(scores + bias[b, h, t], where=visible, out=np.zeros(S))
        total = chances.sum() + (0 if sink is None else np.exp(sink[h]))
        if total > 0:
            z[b, h, t] = (chances / total) @ v[b, groups[h]]
    return z


@FIXED
@given(call=calls())
def test_reference_equals_numpy(call: Call) -> None:
    np.testing.assert_allclose(oracle(call).detach().numpy(), by_the_formula(call), rtol=0, atol=1e-10)


LOWER = torch.ones(7, 7, dtype=torch.bool).tril()
COINS = torch.rand(2, 6, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.5
PLAIN = {
    "everything visible": ({}, {}),
    "causal": ({"mask": causal()}, {"is_causal": True}),
    "bool mask": ({"mask": Mask.of(COINS | LOWER)}, {"attn_mask": COINS | LOWER}),
    "float mask": ({"bias": COINS.double()}, {"attn_mask": COINS.double()}),
    "scale": ({"scale": 0.5}, {"scale": 0.5}),
}


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize(("ours", "theirs"), PLAIN.values(), ids=PLAIN)
def test_reference_equals_torch(kv_heads: int, ours: dict, theirs: dict) -> None:
    def torch_kernel(call: Call) -> Tensor:
        return scaled_dot_product_attention(call.q, call.k, call.v, **theirs, enable_gqa=True)

    plain = random_call(2, 6, 7, 7, **ours)
    k, v = (x[:, :kv_heads].detach().requires_grad_() for x in (plain.k, plain.v))
    call = Call(plain.q, k, v, **ours)
    assert_close(run_both_ways(oracle, call), run_both_ways(torch_kernel, call), 1e-10)


# Every kernel, against the reference: first one feature at a time, so that a failure has a name, then any mixture.

B, H, T, S = 2, 6, 7, 11


def coins(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(8)) < 0.6


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


ONE_BY_ONE: dict[str, dict] = {
    "nothing": {},
    "causal": {"mask": causal()},
    "causal from the first key": {"mask": causal(offset=0)},
    "causal, offset": {"mask": causal(offset=2)},
    "causal, negative offset": {"mask": causal(offset=-3)},
    "window": {"mask": window(3)},
    "window ahead": {"mask": window(2, ahead=4)},
    "padding": {"mask": padding_mask(coins(B, S))},
    "document": {"mask": document_mask(torch.arange(B * S).view(B, S) // 4, torch.arange(B * T).view(B, T) // 3)},
    "per head": {"mask": per_head([causal(), window(2), padding_mask(coins(B, S)), causal(1), window(1), causal(-2)])},
    "allow, with empty rows": {"mask": Mask.of(coins(B, H, T, S) & coins(B, H, T, 1))},
    "and": {"mask": causal() & window(3) & padding_mask(coins(B, S))},
    "or": {"mask": (causal() & window(2)) | padding_mask(torch.arange(S)[None] < 2)},
    "alibi": {"mask": causal(), "bias": Alibi(alibi_slopes(H))},
    "buckets": {"mask": causal(), "bias": Buckets(torch.linspace(-2, 2, 8 * H).view(H, 8), farthest=11)},
    "bias": {"bias": numbers(1, H, T, S)},
    "learned bias": {"bias": numbers(B, 1, T, S).requires_grad_()},
    "learned bias with −inf": {
        "bias": numbers(1, H, T, S).masked_fill(~coins(1, 1, T, S), -torch.inf).requires_grad_()
    },
    "bias with rows of −inf": {"bias": numbers(B, H, T, S).masked_fill(~coins(B, H, T, 1), -torch.inf)},
    "off by one": {"sink": 0.0, "mask": causal()},
    "sink": {"sink": numbers(H).requires_grad_()},
    "sink, causal from the first key": {"sink": numbers(H).requires_grad_(), "mask": causal(offset=0)},
    "cap": {"softcap": 0.7, "mask": causal()},
    "scale": {"scale": 1.3},
    "uneven groups": {"groups": (2, 0, 0, 2, 0, 0), "mask": causal()},
}


TAKEN = [(name, feature) for name in KERNELS for feature in ONE_BY_ONE if (name, feature) != ("fused", "cap")]


@each_float
@pytest.mark.parametrize(("name", "feature"), TAKEN)
def test_kernel_equals_reference_feature_by_feature(name: str, feature: str, dtype: torch.dtype) -> None:
    q, k, v = (numbers(*shape).requires_grad_() for shape in ((B, H, T, 5), (B, 3, S, 5), (B, 3, S, 13)))
    call = Call(q, k, v, **ONE_BY_ONE[feature]).to(dtype)
    want = run_both_ways(oracle, call.to(torch.float64))
    assert_close(run_both_ways(KERNELS[name], call), want, TOLERANCE[dtype])


@each_kernel
def test_heads_may_read_as_many_key_heads_in_another_order(name: str) -> None:
    plain = random_call(2, 3, 7, 11)
    call = Call(plain.q, plain.k, plain.v, groups=(2, 0, 0))
    assert_close(run_both_ways(KERNELS[name], call), run_both_ways(oracle, call), 1e-10)


@each_float
@each_kernel
@settings(FIXED, max_examples=50)  # a hundred for each kernel
@given(data=st.data())
def test_kernel_equals_reference_whatever_the_call(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    call = data.draw(calls(capped=name != "fused")).to(dtype)
    want = run_both_ways(oracle, call.to(torch.float64))
    assert_close(run_both_ways(KERNELS[name], call), want, TOLERANCE[dtype])
    with torch.no_grad():  # without gradients nothing is recomputed: another path through the blocks
        assert_close({"z": KERNELS[name](call)}, {"z": want["z"]}, TOLERANCE[dtype])


@pytest.mark.parametrize("sizes", [(2, 0, 7, 11), (2, 3, 0, 11), (2, 3, 7, 0), (0, 3, 7, 11)], ids=str)
@each_kernel_and_reference
def test_no_head_no_query_no_key_or_no_batch_gives_zeros(name: str, sizes: tuple[int, int, int, int]) -> None:
    for parts in run_both_ways(ALL[name], random_call(*sizes)).values():
        assert not parts.any()


def test_no_head_may_be_left_of_a_grouped_layer() -> None:
    q, k, v = torch.randn(2, 0, 7, 5), torch.randn(2, 3, 11, 5), torch.randn(2, 3, 11, 13)
    for kernel in ALL.values():
        assert kernel(Call(q, k, v, groups=())).shape == (2, 0, 7, 13)


def test_fused_refuses_a_softcap() -> None:
    with pytest.raises(HeadwiseError, match=r"the fused kernel cannot cap scores; use backend='blockwise'"):
        KERNELS["fused"](random_call(1, 2, 3, 5, softcap=2.0))


# Rows that may look nowhere.


def hide(index: tuple) -> Tensor:
    visible = torch.ones(B, H, T, S, dtype=torch.bool)
    visible[index] = False
    return visible


NOWHERE: dict[str, dict] = {
    "one row": {"mask": Mask.of(hide((slice(None), slice(None), 4)))},
    "one row of a head": {"mask": Mask.of(hide((1, 2, 4)))},
    "one head": {"mask": per_head([causal(), Mask.of(torch.zeros(1, 1, dtype=torch.bool)), *[window(3)] * 4])},
    "one batch row": {"mask": padding_mask(torch.tensor([[1] * S, [0] * S])) & causal()},
    "the first rows, by offset": {"mask": causal(offset=-3)},
    "everything, by tensor": {"mask": Mask.of(torch.zeros(T, S, dtype=torch.bool))},
    "everything, by offset": {"mask": causal(offset=-T)},
    "everything, by a far window": {"mask": window(2, ahead=0, offset=S + 5)},
    "one row, by bias": {"bias": torch.zeros(B, H, T, S).masked_fill(~hide((0, 1, 4)), -torch.inf)},
    "one row, by bias and mask": {
        "bias": torch.zeros(1, 1, 1, S).masked_fill(torch.arange(S) < 6, -torch.inf),
        "mask": window(1, ahead=1, offset=0),
    },
}


def rows_that_see_nothing(options: dict) -> Tensor:
    visible = options.get("mask", Mask.of(torch.ones(1, 1, dtype=torch.bool))).dense(T, S).expand(B, H, T, S)
    return ~(visible & (options.get("bias", torch.zeros(1)) > -torch.inf)).any(-1)  # (B, H, T)


@each_float
@pytest.mark.parametrize("sink", [None, 0.0, "learned"])
@pytest.mark.parametrize("options", NOWHERE.values(), ids=NOWHERE)
@each_kernel_and_reference
def test_rows_that_see_nothing_are_zero_with_finite_gradients(
    name: str, options: dict, sink: float | str | None, dtype: torch.dtype
) -> None:
    nowhere = rows_that_see_nothing(options)
    assert nowhere.any()
    logits = torch.ones(H, dtype=dtype, requires_grad=True) if sink == "learned" else sink
    result = run_both_ways(ALL[name], random_call(B, H, T, S, dtype=dtype, sink=logits, **options))
    for part, tensor in result.items():
        assert tensor.isfinite().all(), part
        if nowhere.all():
            assert not tensor.any(), part
    assert not result["z"][nowhere].any()
    assert not result["gradient of q"][nowhere].any()


# What the fused kernel does with inputs too large for one mask.


BEHIND_PADDING = causal() & padding_mask(torch.arange(137) > torch.tensor([[3], [70]]))
TOO_LARGE: dict[str, tuple[int, dict]] = {  # how many rows at a time, and the call
    "padding": (64, {"mask": BEHIND_PADDING}),
    "alibi": (64, {"mask": causal(offset=2), "bias": Alibi(alibi_slopes(3))}),
    "bias": (64, {"bias": torch.linspace(-1, 1, 131 * 137).view(1, 1, 131, 137)}),
    "window": (7, {"mask": causal() & window(4)}),
    "window before the first key": (7, {"mask": window(3, ahead=2, offset=-9)}),
}


@each_float
@pytest.mark.parametrize("sink", [None, 0.0])
@pytest.mark.parametrize(("rows", "options"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_fused_in_blocks_of_rows_equals_reference(
    rows: int, options: dict, sink: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_module, "MASK_BUDGET", 1)  # the kernel never takes fewer than 64 rows for it
    monkeypatch.setattr(fused_module, "NARROW_BLOCK", 7)
    taken, by_blocks = [], fused_module.by_blocks
    monkeypatch.setattr(fused_module, "by_blocks", lambda *given: taken.append(given[-1].rows) or by_blocks(*given))

    call = random_call(2, 3, 131, 137, sink=sink, **options).to(dtype)
    got = run_both_ways(KERNELS["fused"], call)
    assert taken == [rows], "the call was to go in blocks"
    assert_close(got, run_both_ways(oracle, call.to(torch.float64)), TOLERANCE[dtype])


@each_float
def test_fused_skips_a_whole_tile_of_hidden_keys(dtype: torch.dtype) -> None:
    """Left padding longer than the 512 keys a flash kernel takes at a time, so that its first tile is all −inf."""
    call = random_call(1, 2, 3, 1031, mask=padding_mask(torch.arange(1031)[None] >= 1019)).to(dtype)
    want = run_both_ways(oracle, call.to(torch.float64))
    assert_close(run_both_ways(KERNELS["fused"], call), want, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["fused", "blockwise", "blockwise, 3 rows", "blockwise, 3 rows, 2 heads"])
def test_keys_outside_the_window_are_never_touched(name: str) -> None:
    """`Mask.keys` promises that kernels skip what lies beyond; a NaN there would show in z or in a gradient."""
    clean = random_call(2, 3, 7, 29, mask=causal() & window(4))
    k, v = (x.detach().clone() for x in (clean.k, clean.v))
    unseen = 29 - 7 - 3  # the first query stands at 22 and sees three more behind it
    k[:, :, :unseen] = v[:, :, :unseen] = torch.nan
    poisoned = Call(clean.q, k.requires_grad_(), v.requires_grad_(), mask=clean.mask)
    assert_close(run_both_ways(KERNELS[name], poisoned), run_both_ways(oracle, clean), 1e-10)


# Dropout.


@pytest.mark.parametrize("sink", [None, 0.0])
@each_kernel_and_reference
def test_dropout_keeps_the_mean(name: str, sink: float | None) -> None:
    """Each batch row is one more throw of the dice on the same numbers."""
    throws, one = 4000, random_call(1, 3, 2, 5, mask=causal(), sink=sink)
    q, k, v = (x.detach().expand(throws, -1, -1, -1) for x in (one.q, one.k, one.v))
    torch.manual_seed(0)
    dropped = ALL[name](Call(q, k, v, mask=one.mask, sink=sink, dropout=0.3))
    spread = dropped.std(0)
    assert (spread > 0.01).all(), "nothing was dropped"
    error = (dropped.mean(0) - oracle(one)[0]).abs() * throws**0.5 / spread
    assert error.max() < 4.5, "standard errors away from the undropped output"


@each_kernel_and_reference
def test_dropout_of_zero_changes_nothing(name: str) -> None:
    call = random_call(2, 3, 7, 11, mask=causal())
    again = Call(call.q, call.k, call.v, mask=call.mask, dropout=0.0)
    assert torch.equal(ALL[name](call), ALL[name](again))
