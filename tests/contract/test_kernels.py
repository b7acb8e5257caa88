"""Contract 1: every kernel equals the reference, forward and gradient, and the reference equals other implementations."""

from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headwise.errors import HeadwiseError
from headwise.kernels import (
    AlibiBias,
    Mask,
    T5RelativeBias,
    alibi_slopes,
    causal,
    document_mask,
    padding_mask,
    per_head,
    repeat_kv,
    window,
)
from headwise.kernels.batched import attend_with_weights, attention_weight_rows, attention_weights
from headwise.kernels.dispatch import make_score_params
from tests.contract.variants import (
    FIXED_SETTINGS,
    FLOATS,
    KERNELS,
    TOLERANCE,
    KernelCall,
    assert_close,
    calls,
    forward_and_backward,
    oracle,
)

ALL = KERNELS | {"reference": oracle}
each_kernel = pytest.mark.parametrize("name", KERNELS)
each_kernel_and_reference = pytest.mark.parametrize("name", ALL)
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=["float64", "float32"])
HALVES = [torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", [*FLOATS, *HALVES], ids=["float64", "float32", "bfloat16", "float16"])
# Relative to the largest entry. Each operation of a kernel rounds once, to 8 or 11 bits.
HALF_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
TOLERANCES = TOLERANCE | HALF_TOLERANCE

# `headwise.kernels.fused` is the function, so the module is imported by its path.
fused_module = import_module("headwise.kernels.fused")
batched_module = import_module("headwise.kernels.batched")


def random_call(
    B: int, H: int, T: int, S: int, d: int = 5, dtype: torch.dtype = torch.float64, **options
) -> KernelCall:
    """Return a call with plain heads and random tensors that need gradients."""
    generator = torch.Generator().manual_seed(1)
    shapes = (B, H, T, d), (B, H, S, d), (B, H, S, d)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return KernelCall(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), **options)


@given(call=calls(), data=st.data())
@FIXED_SETTINGS
def test_maps_of_rows_one_batch_row_equals_full_map(call: KernelCall, data: st.DataObject) -> None:
    params = make_score_params(call.q, call.k, call.v, **call.options)
    batch_index, row = (data.draw(st.integers(0, call.q.shape[axis] - 1)) for axis in (0, 2))
    batch_slice = slice(batch_index, batch_index + 1)
    got = attention_weight_rows(call.q, call.k, params, range(row, row + 1), batch_slice)
    torch.testing.assert_close(
        got, attention_weights(call.q, call.k, params)[batch_slice, :, row : row + 1], rtol=0, atol=1e-12
    )


def blocks_of_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Compute maps of any size in blocks of this many rows."""
    monkeypatch.setattr(batched_module, "MAX_ENTRIES", 0)
    monkeypatch.setattr(batched_module, "BLOCK_ROWS", rows)
    monkeypatch.setattr(batched_module, "BLOCK_ENTRIES", 8 * rows)  # several heads of few keys


def full_weights(call: KernelCall) -> Tensor:
    """Return all maps, computed at once."""
    params = make_score_params(call.q, call.k, call.v, **call.options)
    return attention_weight_rows(call.q, call.k, params, range(call.q.shape[2]))


@given(call=calls(), rows=st.integers(1, 5), grad=st.booleans())
@FIXED_SETTINGS
def test_maps_in_blocks_equal_maps_at_once(call: KernelCall, rows: int, grad: bool) -> None:
    params = make_score_params(call.q, call.k, call.v, **call.options)
    with pytest.MonkeyPatch.context() as monkeypatch, torch.set_grad_enabled(grad):
        blocks_of_rows(monkeypatch, rows)
        weights = attention_weights(call.q, call.k, params)
    torch.testing.assert_close(weights, full_weights(call), rtol=0, atol=1e-12)


@given(call=calls(), rows=st.integers(1, 5), keep_weights=st.booleans())
@FIXED_SETTINGS
def test_attend_with_weights_equals_maps_at_once(call: KernelCall, rows: int, keep_weights: bool) -> None:
    params = make_score_params(call.q, call.k, call.v, **call.options)
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        blocks_of_rows(monkeypatch, rows)
        z, weights = attend_with_weights(call.q, call.k, call.v, params, keep_weights=keep_weights)
        expected = full_weights(call)
    torch.testing.assert_close(z, expected @ repeat_kv(call.v, params.kv_of_head), rtol=1e-10, atol=1e-10)
    assert (weights is not None) == keep_weights
    if weights is not None:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


@given(call=calls(), rows=st.integers(1, 5))
@FIXED_SETTINGS
def test_maps_in_blocks_gradients_equal_maps_at_once(call: KernelCall, rows: int) -> None:
    expected = full_weights(call)
    factors = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(0))
    params = make_score_params(call.q, call.k, call.v, **call.options)
    with pytest.MonkeyPatch.context() as monkeypatch:
        blocks_of_rows(monkeypatch, rows)
        grads = torch.autograd.grad((attention_weights(call.q, call.k, params) * factors).sum(), (call.q, call.k))
    for grad, reference in zip(grads, torch.autograd.grad((expected * factors).sum(), (call.q, call.k)), strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-10, atol=1e-10)


def test_maps_in_blocks_second_derivative_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(2, 2, 5, 7, d=3, mask=causal())
    params = make_score_params(call.q, call.k, call.v, **call.options)
    blocks_of_rows(monkeypatch, 2)
    assert torch.autograd.gradgradcheck(lambda q, k: attention_weights(q, k, params), (call.q, call.k))


# The reference kernel against independent implementations.


def numpy_attention(call: KernelCall) -> np.ndarray:
    """Attention in numpy, one query at a time."""
    q, k, v = (x.detach().numpy() for x in (call.q, call.k, call.v))
    (B, H, T, d), (_, K, S, e) = q.shape, v.shape
    kv_of_head = call.kv_of_head or [head * K // H for head in range(H)]
    allowed = np.ones((B, H, T, S), bool)
    if call.mask is not None:
        allowed = call.mask.dense(T, S).expand(B, H, T, S).numpy()
    bias = np.zeros((B, H, T, S))
    if isinstance(call.bias, Tensor):
        bias = np.broadcast_to(call.bias.detach().numpy(), bias.shape)
    elif call.bias is not None:
        positions = np.arange(T)[:, None] + S - T
        bias = bias - call.bias.slopes.numpy()[:, None, None] * abs(positions - np.arange(S))
    sink = None if call.sink is None else torch.as_tensor(call.sink).detach().expand(H).numpy()

    z = np.zeros((B, H, T, e))
    for b, h, t in np.ndindex(B, H, T):
        scores = k[b, kv_of_head[h]] @ q[b, h, t] * (d**-0.5 if call.scale is None else call.scale)
        if call.softcap is not None:
            scores = call.softcap * np.tanh(scores / call.softcap)
        visible = allowed[b, h, t] & np.isfinite(bias[b, h, t])
        exp_scores = np.exp(scores + bias[b, h, t], where=visible, out=np.zeros(S))
        total = exp_scores.sum() + (0 if sink is None else np.exp(sink[h]))
        if total > 0:
            z[b, h, t] = (exp_scores / total) @ v[b, kv_of_head[h]]
    return z


@FIXED_SETTINGS
@given(call=calls())
def test_reference_any_call_equals_numpy(call: KernelCall) -> None:
    np.testing.assert_allclose(oracle(call).detach().numpy(), numpy_attention(call), rtol=0, atol=1e-10)


LOWER = torch.ones(7, 7, dtype=torch.bool).tril()
RANDOM_BOOLS = torch.rand(2, 6, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.5
PLAIN = {
    "everything visible": ({}, {}),
    "causal": ({"mask": causal()}, {"is_causal": True}),
    "bool mask": ({"mask": Mask.of(RANDOM_BOOLS | LOWER)}, {"attn_mask": RANDOM_BOOLS | LOWER}),
    "float mask": ({"bias": RANDOM_BOOLS.double()}, {"attn_mask": RANDOM_BOOLS.double()}),
    "scale": ({"scale": 0.5}, {"scale": 0.5}),
}


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize(("options", "sdpa_options"), PLAIN.values(), ids=PLAIN)
def test_reference_plain_call_equals_torch(kv_heads: int, options: dict, sdpa_options: dict) -> None:
    def torch_kernel(call: KernelCall) -> Tensor:
        return scaled_dot_product_attention(call.q, call.k, call.v, **sdpa_options, enable_gqa=True)

    plain = random_call(2, 6, 7, 7, **options)
    k, v = (x[:, :kv_heads].detach().requires_grad_() for x in (plain.k, plain.v))
    call = KernelCall(plain.q, k, v, **options)
    assert_close(forward_and_backward(oracle, call), forward_and_backward(torch_kernel, call), 1e-10)


# Every kernel against the reference: single features, then random combinations.

B, H, T, S = 2, 6, 7, 11


def random_bools(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(8)) < 0.6


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


FEATURES: dict[str, dict] = {
    "nothing": {},
    "causal": {"mask": causal()},
    "causal from the first key": {"mask": causal(offset=0)},
    "causal, offset": {"mask": causal(offset=2)},
    "causal, negative offset": {"mask": causal(offset=-3)},
    "window": {"mask": window(3)},
    "window ahead": {"mask": window(2, lookahead=4)},
    "padding": {"mask": padding_mask(random_bools(B, S))},
    "document": {"mask": document_mask(torch.arange(B * S).view(B, S) // 4, torch.arange(B * T).view(B, T) // 3)},
    "per head": {
        "mask": per_head([causal(), window(2), padding_mask(random_bools(B, S)), causal(1), window(1), causal(-2)])
    },
    "allow, with empty rows": {"mask": Mask.of(random_bools(B, H, T, S) & random_bools(B, H, T, 1))},
    "and": {"mask": causal() & window(3) & padding_mask(random_bools(B, S))},
    "or": {"mask": (causal() & window(2)) | padding_mask(torch.arange(S)[None] < 2)},
    "alibi": {"mask": causal(), "bias": AlibiBias(alibi_slopes(H))},
    "buckets": {"mask": causal(), "bias": T5RelativeBias(torch.linspace(-2, 2, 8 * H).view(H, 8), max_distance=11)},
    "bias": {"bias": random_tensor(1, H, T, S)},
    "learned bias": {"bias": random_tensor(B, 1, T, S).requires_grad_()},
    "learned bias with −inf": {
        "bias": random_tensor(1, H, T, S).masked_fill(~random_bools(1, 1, T, S), -torch.inf).requires_grad_()
    },
    "bias with rows of −inf": {"bias": random_tensor(B, H, T, S).masked_fill(~random_bools(B, H, T, 1), -torch.inf)},
    "off by one": {"sink": 0.0, "mask": causal()},
    "sink": {"sink": random_tensor(H).requires_grad_()},
    "sink, causal from the first key": {"sink": random_tensor(H).requires_grad_(), "mask": causal(offset=0)},
    "cap": {"softcap": 0.7, "mask": causal()},
    "scale": {"scale": 1.3},
    "uneven groups": {"kv_of_head": (2, 0, 0, 2, 0, 0), "mask": causal()},
}


KERNEL_FEATURES = [(name, feature) for name in KERNELS for feature in FEATURES if (name, feature) != ("fused", "cap")]


@each_dtype
@pytest.mark.parametrize(("name", "feature"), KERNEL_FEATURES)
def test_kernel_single_feature_equals_reference(name: str, feature: str, dtype: torch.dtype) -> None:
    q, k, v = (random_tensor(*shape).requires_grad_() for shape in ((B, H, T, 5), (B, 3, S, 5), (B, 3, S, 13)))
    call = KernelCall(q, k, v, **FEATURES[feature]).to(dtype)
    want = forward_and_backward(oracle, call.to(torch.float64))
    assert_close(forward_and_backward(KERNELS[name], call), want, TOLERANCES[dtype])


@each_kernel
def test_kernel_reordered_groups_equals_reference(name: str) -> None:
    plain = random_call(2, 3, 7, 11)
    call = KernelCall(plain.q, plain.k, plain.v, kv_of_head=(2, 0, 0))
    assert_close(forward_and_backward(KERNELS[name], call), forward_and_backward(oracle, call), 1e-10)


@each_float
@each_kernel
@settings(FIXED_SETTINGS, max_examples=50)  # a hundred per kernel
@given(data=st.data())
def test_kernel_any_call_equals_reference(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    call = data.draw(calls(capped=name != "fused")).to(dtype)
    want = forward_and_backward(oracle, call.to(torch.float64))
    assert_close(forward_and_backward(KERNELS[name], call), want, TOLERANCE[dtype])
    with torch.no_grad():  # without gradients nothing is recomputed, which is another code path
        assert_close({"z": KERNELS[name](call)}, {"z": want["z"]}, TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@each_kernel
@settings(FIXED_SETTINGS, max_examples=50)
@given(data=st.data())
def test_kernel_any_call_in_half_precision_equals_reference(name: str, dtype: torch.dtype, data: st.DataObject) -> None:
    call = data.draw(calls(capped=name != "fused")).to(dtype)
    want = forward_and_backward(oracle, call.to(torch.float64))
    assert_close(forward_and_backward(KERNELS[name], call), want, TOLERANCES[dtype])


@pytest.mark.parametrize("sizes", [(2, 0, 7, 11), (2, 3, 0, 11), (2, 3, 7, 0), (0, 3, 7, 11)], ids=str)
@each_kernel_and_reference
def test_kernel_empty_sizes_give_zeros(name: str, sizes: tuple[int, int, int, int]) -> None:
    for parts in forward_and_backward(ALL[name], random_call(*sizes)).values():
        assert not parts.any()


def test_kernel_no_query_heads_gives_empty_output() -> None:
    q, k, v = torch.randn(2, 0, 7, 5), torch.randn(2, 3, 11, 5), torch.randn(2, 3, 11, 13)
    for kernel in ALL.values():
        assert kernel(KernelCall(q, k, v, kv_of_head=())).shape == (2, 0, 7, 13)


def test_fused_softcap_raises() -> None:
    with pytest.raises(HeadwiseError, match="does not support softcap"):
        KERNELS["fused"](random_call(1, 2, 3, 5, softcap=2.0))


# Rows without visible keys.


def hide(index: tuple) -> Tensor:
    visible = torch.ones(B, H, T, S, dtype=torch.bool)
    visible[index] = False
    return visible


EMPTY_ROW_CALLS: dict[str, dict] = {
    "one row": {"mask": Mask.of(hide((slice(None), slice(None), 4)))},
    "one row of a head": {"mask": Mask.of(hide((1, 2, 4)))},
    "one head": {"mask": per_head([causal(), Mask.of(torch.zeros(1, 1, dtype=torch.bool)), *[window(3)] * 4])},
    "one batch row": {"mask": padding_mask(torch.tensor([[1] * S, [0] * S])) & causal()},
    "the first rows, by offset": {"mask": causal(offset=-3)},
    "everything, by tensor": {"mask": Mask.of(torch.zeros(T, S, dtype=torch.bool))},
    "everything, by offset": {"mask": causal(offset=-T)},
    "everything, by a far window": {"mask": window(2, lookahead=0, offset=S + 5)},
    "one row, by bias": {"bias": torch.zeros(B, H, T, S).masked_fill(~hide((0, 1, 4)), -torch.inf)},
    "one row, by bias and mask": {
        "bias": torch.zeros(1, 1, 1, S).masked_fill(torch.arange(S) < 6, -torch.inf),
        "mask": window(1, lookahead=1, offset=0),
    },
}


def empty_rows(options: dict) -> Tensor:
    visible = options.get("mask", Mask.of(torch.ones(1, 1, dtype=torch.bool))).dense(T, S).expand(B, H, T, S)
    return ~(visible & (options.get("bias", torch.zeros(1)) > -torch.inf)).any(-1)  # (B, H, T)


@each_dtype
@pytest.mark.parametrize("sink", [None, 0.0, "learned"])
@pytest.mark.parametrize("options", EMPTY_ROW_CALLS.values(), ids=EMPTY_ROW_CALLS)
@each_kernel_and_reference
def test_kernel_fully_masked_rows_give_zeros_and_finite_gradients(
    name: str, options: dict, sink: float | str | None, dtype: torch.dtype
) -> None:
    empty = empty_rows(options)
    assert empty.any()
    logits = torch.ones(H, dtype=dtype, requires_grad=True) if sink == "learned" else sink
    result = forward_and_backward(ALL[name], random_call(B, H, T, S, dtype=dtype, sink=logits, **options))
    for part, tensor in result.items():
        assert tensor.isfinite().all(), part
        if empty.all():
            assert not tensor.any(), part
    assert not result["z"][empty].any()
    assert not result["gradient of q"][empty].any()


# The fused kernel on inputs that are too large for one mask.


LEFT_PADDING = causal() & padding_mask(torch.arange(137) > torch.tensor([[3], [70]]))
LARGE_CALLS: dict[str, tuple[int, dict]] = {  # rows per block, and the call
    "padding": (64, {"mask": LEFT_PADDING}),
    "alibi": (64, {"mask": causal(offset=2), "bias": AlibiBias(alibi_slopes(3))}),
    "bias": (64, {"bias": torch.linspace(-1, 1, 131 * 137).view(1, 1, 131, 137)}),
    "window": (7, {"mask": causal() & window(4)}),
    "window before the first key": (7, {"mask": window(3, lookahead=2, offset=-9)}),
}


@each_float
@pytest.mark.parametrize("sink", [None, 0.0])
@pytest.mark.parametrize(("rows", "options"), LARGE_CALLS.values(), ids=LARGE_CALLS)
def test_fused_row_blocks_equal_reference(
    rows: int, options: dict, sink: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_module, "MASK_BUDGET", 1)  # the minimum is 64 rows
    monkeypatch.setattr(fused_module, "NARROW_ROW_BLOCK", 7)
    block_rows, run_blocks = [], fused_module.run_blocks
    monkeypatch.setattr(fused_module, "run_blocks", lambda *args: block_rows.append(args[-1].rows) or run_blocks(*args))

    call = random_call(2, 3, 131, 137, sink=sink, **options).to(dtype)
    got = forward_and_backward(KERNELS["fused"], call)
    assert block_rows == [rows], "the call was to go in blocks"
    assert_close(got, forward_and_backward(oracle, call.to(torch.float64)), TOLERANCE[dtype])


@each_dtype
def test_fused_fully_masked_key_tile_equals_reference(dtype: torch.dtype) -> None:
    """Left padding longer than the 512 keys of a flash kernel tile, so that the first tile is all −inf."""
    call = random_call(1, 2, 3, 1031, mask=padding_mask(torch.arange(1031)[None] >= 1019)).to(dtype)
    want = forward_and_backward(oracle, call.to(torch.float64))
    assert_close(forward_and_backward(KERNELS["fused"], call), want, TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["fused", "blockwise", "blockwise, 3 rows", "blockwise, 3 rows, 2 heads"])
def test_kernel_keys_outside_window_are_not_read(name: str) -> None:
    """Kernels skip keys outside of `Mask.key_range`: a NaN there would appear in z or in a gradient."""
    clean = random_call(2, 3, 7, 29, mask=causal() & window(4))
    k, v = (x.detach().clone() for x in (clean.k, clean.v))
    unseen = 29 - 7 - 3  # the first query is at position 22 and sees three earlier keys
    k[:, :, :unseen] = v[:, :, :unseen] = torch.nan
    poisoned = KernelCall(clean.q, k.requires_grad_(), v.requires_grad_(), mask=clean.mask)
    assert_close(forward_and_backward(KERNELS[name], poisoned), forward_and_backward(oracle, clean), 1e-10)


# Dropout.


@pytest.mark.parametrize("sink", [None, 0.0])
@each_kernel_and_reference
def test_dropout_many_draws_keep_mean(name: str, sink: float | None) -> None:
    """Each example draws another dropout mask for the same inputs."""
    draws, base = 4000, random_call(1, 3, 2, 5, mask=causal(), sink=sink)
    q, k, v = (x.detach().expand(draws, -1, -1, -1) for x in (base.q, base.k, base.v))
    torch.manual_seed(0)
    dropped = ALL[name](KernelCall(q, k, v, mask=base.mask, sink=sink, dropout=0.3))
    spread = dropped.std(0)
    assert (spread > 0.01).all(), "nothing was dropped"
    error = (dropped.mean(0) - oracle(base)[0]).abs() * draws**0.5 / spread
    assert error.max() < 4.5, "standard errors away from the undropped output"


@each_kernel_and_reference
def test_dropout_zero_changes_nothing(name: str) -> None:
    call = random_call(2, 3, 7, 11, mask=causal())
    again = KernelCall(call.q, call.k, call.v, mask=call.mask, dropout=0.0)
    assert torch.equal(ALL[name](call), ALL[name](again))
