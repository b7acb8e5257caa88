"""Masks against loops written from their docstrings, their guarantees to kernels, and conversion to and from torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from headwise.errors import HeadwiseError
from headwise.kernels import Mask, attention, causal, document_mask, padding_mask, per_head, window
from headwise.kernels.torch_mask_conversion import from_mha, from_mha_padding, from_sdpa, to_mha, to_sdpa
from tests.contract.variants import BATCHES, FIXED_SETTINGS, TOKENS, masks

B, H = 2, 3
each_size = pytest.mark.parametrize(("T", "S"), TOKENS)
each_offset = pytest.mark.parametrize("offset", [None, -20, -3, 0, 2, 20])


def dense_by_rule(T: int, S: int, sees: Callable[[int, int, int, int], bool]) -> Tensor:
    """Build a dense mask from a rule on (batch row, head, query, key)."""
    return torch.tensor(
        [[[[sees(b, h, i, j) for j in range(S)] for i in range(T)] for h in range(H)] for b in range(B)]
    )


def dense(mask: Mask, T: int, S: int) -> Tensor:
    return mask.dense(T, S).expand(B, H, T, S)


def random_bools(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.5


# Each mask against its definition.


@each_offset
@each_size
def test_causal_any_offset_equals_definition(T: int, S: int, offset: int | None) -> None:
    before = S - T if offset is None else offset
    assert torch.equal(dense(causal(offset), T, S), dense_by_rule(T, S, lambda b, h, i, j: j <= i + before))


@each_offset
@pytest.mark.parametrize("ahead", [None, 0, 2])
@pytest.mark.parametrize("size", [1, 3, 30])
@each_size
def test_window_any_size_equals_definition(T: int, S: int, size: int, ahead: int | None, offset: int | None) -> None:
    before = S - T if offset is None else offset
    forward = size - 1 if ahead is None else ahead  # default: the same number of positions ahead as back
    want = dense_by_rule(T, S, lambda b, h, i, j: -forward <= (i + before) - j < size)
    assert torch.equal(dense(window(size, ahead, offset), T, S), want)


@each_size
def test_padding_mask_hides_padding(T: int, S: int) -> None:
    real_tokens = random_bools(B, S)
    want = dense_by_rule(T, S, lambda b, h, i, j: bool(real_tokens[b, j]))
    assert torch.equal(dense(padding_mask(real_tokens), T, S), want)
    assert torch.equal(dense(padding_mask(real_tokens.int()), T, S), want), "1 is as good as True"


@each_size
def test_document_mask_stays_within_document(T: int, S: int) -> None:
    generator = torch.Generator().manual_seed(4)
    keys_of, queries_of = torch.randint(3, (B, S), generator=generator), torch.randint(3, (B, T), generator=generator)
    want = dense_by_rule(T, S, lambda b, h, i, j: bool(queries_of[b, i] == keys_of[b, j]))
    assert torch.equal(dense(document_mask(keys_of, queries_of), T, S), want)


def test_document_mask_without_queries_uses_key_ids() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1], [4, 4, 4, 4, 0]])
    assert torch.equal(
        dense(document_mask(ids), 5, 5), dense_by_rule(5, 5, lambda b, h, i, j: bool(ids[b, i] == ids[b, j]))
    )


def test_per_head_mask_applies_to_each_head() -> None:
    real_tokens = random_bools(B, 11)

    def sees(b: int, h: int, i: int, j: int) -> bool:
        return (j <= i + 4, abs(i + 4 - j) < 2, bool(real_tokens[b, j]))[h]

    mask = per_head([causal(), window(2), padding_mask(real_tokens)])
    assert torch.equal(dense(mask, 7, 11), dense_by_rule(7, 11, sees))


@pytest.mark.parametrize("shape", [(7, 11), (B, 7, 11), (B, H, 7, 11), (1, H, 7, 11), (B, 1, 1, 11), (7, 1)])
def test_mask_of_two_to_four_axes_broadcasts(shape: tuple[int, ...]) -> None:
    tensor = random_bools(*shape)
    batch_and_heads = {2: (1, 1), 3: (shape[0], 1), 4: shape[:2]}[len(shape)]
    full = tensor.reshape(*batch_and_heads, *shape[-2:]).expand(B, H, 7, 11)
    assert torch.equal(dense(Mask.of(tensor), 7, 11), full)


# Guarantees of masks. Kernels skip work because of them, so they must never be wrong.


@st.composite
def sized_masks(draw: st.DrawFn) -> tuple[Mask, int, int]:
    """Return a mask for B examples and H heads with its number of queries and keys."""
    T, S = draw(st.sampled_from(TOKENS))
    return draw(masks(B, H, T, S)), T, S


@FIXED_SETTINGS
@given(placed=sized_masks(), data=st.data())
def test_mask_keys_outside_range_are_hidden(placed: tuple[Mask, int, int], data: st.DataObject) -> None:
    mask, T, S = placed
    rows = data.draw(nonempty_ranges(T))
    keys = mask.key_range(rows, T, S)
    assert 0 <= keys.start <= keys.stop <= S
    visible = dense(mask, T, S)[:, :, rows.start : rows.stop]
    assert not visible[..., : keys.start].any()
    assert not visible[..., keys.stop :].any()


@FIXED_SETTINGS
@given(placed=sized_masks())
def test_mask_is_full_and_may_be_empty_are_sound(placed: tuple[Mask, int, int]) -> None:
    mask, T, S = placed
    visible = dense(mask, T, S)
    assert visible.all() or not mask.is_full(T, S)
    assert visible.any(-1).all() or mask.may_have_empty_rows(T, S)


def test_mask_common_cases_are_full_or_not_empty() -> None:
    """These common calls use the fastest kernel path, because the mask recognizes that it is full or has no empty rows."""
    assert causal().is_full(1, 11), "one query at the end of a cache sees everything"
    assert window(11).is_full(7, 11)
    for mask in (causal(), window(3), causal() & window(3), causal() | padding_mask(random_bools(B, 11))):
        assert not mask.may_have_empty_rows(7, 11)


def nonempty_ranges(length: int) -> st.SearchStrategy[range]:
    """Return a nonempty range of rows or columns."""
    ends = st.tuples(st.integers(0, length - 1), st.integers(1, length))
    return ends.map(lambda pair: range(pair[0], max(pair[0] + 1, pair[1])))


@FIXED_SETTINGS
@given(placed=sized_masks(), data=st.data())
def test_mask_block_equals_slice_of_dense(placed: tuple[Mask, int, int], data: st.DataObject) -> None:
    mask, T, S = placed
    rows, cols = data.draw(nonempty_ranges(T)), data.draw(nonempty_ranges(S))
    block = mask.block(rows, cols, T, S, torch.device("cpu"))
    assert block.dtype == torch.bool
    want = dense(mask, T, S)[:, :, rows.start : rows.stop, cols.start : cols.stop]
    assert torch.equal(block.expand(want.shape), want)


@FIXED_SETTINGS
@given(placed=sized_masks(), heads=nonempty_ranges(H))
def test_mask_for_heads_equals_slice_of_dense(placed: tuple[Mask, int, int], heads: range) -> None:
    mask, T, S = placed
    pick = slice(heads.start, heads.stop)
    sliced = mask.for_heads(pick)
    sliced.check(B, len(heads), T, S)
    assert torch.equal(sliced.dense(T, S).expand(B, len(heads), T, S), dense(mask, T, S)[:, pick])


@FIXED_SETTINGS
@given(placed=sized_masks())
def test_mask_planes_match_dense_shape(placed: tuple[Mask, int, int]) -> None:
    mask, T, S = placed
    mask.check(B, H, T, S)
    shape = mask.dense(T, S).shape
    assert len(shape) == 4
    assert shape[:2] == mask.leading_shape()


@FIXED_SETTINGS
@given(data=st.data(), tokens=st.sampled_from(TOKENS), batch=st.sampled_from(BATCHES))
def test_mask_and_or_equal_elementwise(data: st.DataObject, tokens: tuple[int, int], batch: int) -> None:
    first, second = (data.draw(masks(batch, H, *tokens)) for _ in range(2))
    left, right = dense(first, *tokens), dense(second, *tokens)
    assert torch.equal(dense(first & second, *tokens), left & right)
    assert torch.equal(dense(first | second, *tokens), left | right)


# The two conventions of torch: torch with its mask equals headwise with the converted mask.

T, S, d = 7, 11, 5


def mask_without_empty_rows(shape: tuple[int, ...]) -> Tensor:
    """Return a random mask in which every query has a visible key, because torch returns NaN for the others."""
    mask = random_bools(*shape)
    mask[..., 0] = True
    return mask


def random_qkv() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(B, H, n, d, generator=generator, dtype=torch.float64) for n in (T, S, S))
    return q, k, v


def as_argument(converted: Mask | Tensor) -> dict[str, Any]:
    """Return a converted bool as a mask argument and a converted float as a bias argument."""
    return {"mask": converted} if isinstance(converted, Mask) else {"bias": converted}


# SDPA broadcasts from the right, so three axes are (heads, T, S).
@pytest.mark.parametrize("shape", [(T, S), (H, T, S), (1, T, S), (B, H, T, S), (B, 1, 1, S), (1, H, T, S)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_from_sdpa_attention_equals_sdpa(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = random_qkv()
    mask = mask_without_empty_rows(shape) if kind == "bool" else mask_without_empty_rows(shape).double()
    kwargs = as_argument(from_sdpa(mask))
    torch.testing.assert_close(attention(q, k, v, **kwargs), scaled_dot_product_attention(q, k, v, mask))


def example_masks() -> dict[str, Mask]:
    return {
        "one plane": causal() & window(4),
        "batch rows differ": causal() & padding_mask(mask_without_empty_rows((B, S))),
        "heads differ": per_head([causal(), window(2), Mask.of(mask_without_empty_rows((T, S)))]),
        "both differ": Mask.of(mask_without_empty_rows((B, H, T, S))),
    }


@pytest.mark.parametrize("name", example_masks())
def test_to_sdpa_attention_equals_native(name: str) -> None:
    q, k, v = random_qkv()
    mask = example_masks()[name]
    sdpa_output = scaled_dot_product_attention(q, k, v, to_sdpa(mask, T, S))
    torch.testing.assert_close(sdpa_output, attention(q, k, v, mask=mask))


class TorchLayer:
    """torch's layer, run by torch, and run by headwise with the same weights."""

    def __init__(self) -> None:
        torch.manual_seed(6)
        width = H * d
        self.layer = nn.MultiheadAttention(width, H, batch_first=True, dtype=torch.float64)
        self.x = torch.randn(B, T, width, dtype=torch.float64)
        self.y = torch.randn(B, S, width, dtype=torch.float64)

    def run_torch(self, **masks: Tensor) -> Tensor:
        return self.layer(self.x, self.y, self.y, need_weights=False, **masks)[0]

    def run_native(self, mask: Mask | None = None, bias: Tensor | None = None) -> Tensor:
        q, k, v = (
            linear(x, weight, shift).unflatten(-1, (H, d)).transpose(1, 2)
            for x, weight, shift in zip(
                (self.x, self.y, self.y),
                self.layer.in_proj_weight.chunk(3),
                self.layer.in_proj_bias.chunk(3),
                strict=True,
            )
        )
        return self.layer.out_proj(attention(q, k, v, mask=mask, bias=bias).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("shape", [(T, S), (B * H, T, S)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_from_mha_attention_equals_torch(shape: tuple[int, ...], kind: str) -> None:
    hidden = ~mask_without_empty_rows(shape)
    mask = hidden if kind == "bool" else hidden.double()
    kwargs = as_argument(from_mha(mask, heads=H))
    torch.testing.assert_close(TorchLayer().run_native(**kwargs), TorchLayer().run_torch(attn_mask=mask))


def test_from_mha_padding_attention_equals_torch() -> None:
    hidden = ~mask_without_empty_rows((B, S))
    torch_output = TorchLayer().run_torch(key_padding_mask=hidden)
    torch.testing.assert_close(TorchLayer().run_native(from_mha_padding(hidden)), torch_output)


@pytest.mark.parametrize("name", example_masks())
def test_to_mha_attention_equals_native(name: str) -> None:
    mask = example_masks()[name]
    torch_output = TorchLayer().run_torch(attn_mask=to_mha(mask, T, S, batch=B, heads=H))
    torch.testing.assert_close(torch_output, TorchLayer().run_native(mask))


@pytest.mark.parametrize("convert", [from_mha_padding, lambda mask: from_mha(mask, heads=1)], ids=["padding", "mask"])
def test_from_mha_integer_mask_raises_or_means_bool(convert: Callable[[Tensor], Mask]) -> None:
    """Bitwise inversion would make every integer except −1 true, so that the mask would hide nothing."""
    hidden = ~mask_without_empty_rows((B, S))
    try:
        got = convert(hidden.int())
    except HeadwiseError:
        return
    assert torch.equal(got.dense(B, S), convert(hidden).dense(B, S))


# Errors for arguments that do not fit.


def call_with(mask: Mask) -> Callable[[], object]:
    return lambda: attention(*random_qkv(), mask=mask)


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "window of nothing": (lambda: window(0), "window size=0"),
    "window ahead of itself": (lambda: window(3, lookahead=-1), "window size=3, lookahead=-1"),
    "padding of one axis": (
        lambda: padding_mask(random_bools(S)),
        r"\(batch, keys\), True at real tokens\. Got shape \(11,\)",
    ),
    "additive padding": (lambda: padding_mask(torch.zeros(B, S)), r"True at visible keys\. Got torch.float32"),
    "additive mask": (lambda: Mask.of(torch.zeros(T, S)), "Pass additive scores as bias="),
    "documents of one axis": (lambda: document_mask(torch.zeros(S)), r"\(batch, tokens\)\. Got shape \(11,\)"),
    "no masks": (lambda: per_head([]), "needs at least one mask"),
    "a tensor among masks": (lambda: per_head([random_bools(T, S)]), r"Got Tensor\. Convert a tensor with hw.Mask.of"),  # pyright: ignore
    "a tensor after &": (lambda: causal() & random_bools(T, S), r"must be a Mask\. Got Tensor"),  # pyright: ignore
    "mask of one axis": (
        lambda: Mask.of(random_bools(S)),
        r"\(T, S\), \(B, T, S\) or \(B, H, T, S\)\. Got shape \(11,\)",
    ),
    "padding too short": (
        call_with(padding_mask(random_bools(B, 5))),
        r", 11\), True at real tokens\. Got shape \(2, 5\)",
    ),
    "padding for others": (
        call_with(padding_mask(random_bools(5, S))),
        r"\(2, 11\), True at real tokens\. Got shape \(5, 11\)",
    ),
    "documents of keys only": (
        call_with(document_mask(torch.zeros(B, S))),
        r"\(2, 7\)\. Got shape \(2, 11\)",
    ),
    "too few heads": (call_with(per_head([causal()] * 2)), "2 masks for 3 heads"),
    "mask of swapped axes": (
        call_with(Mask.of(random_bools(S, T))),
        r"\(2, 3, 7, 11\)\. Got shape \(1, 1, 11, 7\)",
    ),
    "a misfit inside &": (
        call_with(causal() & padding_mask(random_bools(B, 5))),
        r"\(2, 11\), True at real tokens\. Got shape \(2, 5\)",
    ),
    "a misfit for one head": (
        call_with(per_head([causal(), padding_mask(random_bools(B, 5)), causal()])),
        r"\(2, 11\), True at real tokens\. Got shape \(2, 5\)",
    ),
    "a bare tensor": (call_with(random_bools(T, S)), r"must be a Mask. Got Tensor. Convert a tensor with hw.Mask.of"),  # pyright: ignore
    "heads that do not divide": (
        lambda: from_mha(random_bools(5, T, S), heads=H),
        "must be a multiple of heads=3",
    ),
    "additive padding of torch": (lambda: from_mha_padding(torch.zeros(B, S)), "Pass it as bias="),
}


@pytest.mark.parametrize(("make", "words"), ERRORS.values(), ids=ERRORS)
def test_mask_invalid_argument_raises(make: Callable[[], object], words: str) -> None:
    with pytest.raises(HeadwiseError, match=words):
        make()
