"""Masks against loops written from their docstrings; their promises to the kernels; torch's conventions both ways."""

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
from headwise.kernels.torch_masks import from_mha, from_mha_padding, from_sdpa, to_mha, to_sdpa
from tests.contract.variants import BATCHES, FIXED, TOKENS, masks

B, H = 2, 3
each_size = pytest.mark.parametrize(("T", "S"), TOKENS)
each_offset = pytest.mark.parametrize("offset", [None, -20, -3, 0, 2, 20])


def loop(T: int, S: int, sees: Callable[[int, int, int, int], bool]) -> Tensor:
    """A dense mask from a rule on (batch row, head, query, key)."""
    return torch.tensor(
        [[[[sees(b, h, i, j) for j in range(S)] for i in range(T)] for h in range(H)] for b in range(B)]
    )


def dense(mask: Mask, T: int, S: int) -> Tensor:
    return mask.dense(T, S).expand(B, H, T, S)


def coins(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.5


# Each mask, against the sentence that says what it is.


@each_offset
@each_size
def test_causal_looks_back_never_ahead(T: int, S: int, offset: int | None) -> None:
    before = S - T if offset is None else offset
    assert torch.equal(dense(causal(offset), T, S), loop(T, S, lambda b, h, i, j: j <= i + before))


@each_offset
@pytest.mark.parametrize("ahead", [None, 0, 2])
@pytest.mark.parametrize("size", [1, 3, 30])
@each_size
def test_window_looks_fewer_than_size_back_and_at_most_ahead(
    T: int, S: int, size: int, ahead: int | None, offset: int | None
) -> None:
    before = S - T if offset is None else offset
    forward = size - 1 if ahead is None else ahead  # by default as far as back
    want = loop(T, S, lambda b, h, i, j: -forward <= (i + before) - j < size)
    assert torch.equal(dense(window(size, ahead, offset), T, S), want)


@each_size
def test_padding_looks_at_real_tokens_only(T: int, S: int) -> None:
    real = coins(B, S)
    want = loop(T, S, lambda b, h, i, j: bool(real[b, j]))
    assert torch.equal(dense(padding_mask(real), T, S), want)
    assert torch.equal(dense(padding_mask(real.int()), T, S), want), "1 is as good as True"


@each_size
def test_document_looks_inside_its_own_document_only(T: int, S: int) -> None:
    draws = torch.Generator().manual_seed(4)
    keys_of, queries_of = torch.randint(3, (B, S), generator=draws), torch.randint(3, (B, T), generator=draws)
    want = loop(T, S, lambda b, h, i, j: bool(queries_of[b, i] == keys_of[b, j]))
    assert torch.equal(dense(document_mask(keys_of, queries_of), T, S), want)


def test_document_takes_the_keys_numbers_for_the_queries_too() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1], [4, 4, 4, 4, 0]])
    assert torch.equal(dense(document_mask(ids), 5, 5), loop(5, 5, lambda b, h, i, j: bool(ids[b, i] == ids[b, j])))


def test_per_head_gives_each_head_its_own() -> None:
    real = coins(B, 11)

    def sees(b: int, h: int, i: int, j: int) -> bool:
        return (j <= i + 4, abs(i + 4 - j) < 2, bool(real[b, j]))[h]

    mask = per_head([causal(), window(2), padding_mask(real)])
    assert torch.equal(dense(mask, 7, 11), loop(7, 11, sees))


@pytest.mark.parametrize("shape", [(7, 11), (B, 7, 11), (B, H, 7, 11), (1, H, 7, 11), (B, 1, 1, 11), (7, 1)])
def test_allow_takes_two_three_or_four_axes(shape: tuple[int, ...]) -> None:
    tensor = coins(*shape)
    batch_and_heads = {2: (1, 1), 3: (shape[0], 1), 4: shape[:2]}[len(shape)]
    full = tensor.reshape(*batch_and_heads, *shape[-2:]).expand(B, H, 7, 11)
    assert torch.equal(dense(Mask.of(tensor), 7, 11), full)


# Their promises. A kernel skips work on the strength of them, so none may ever claim something false.


@st.composite
def placed_masks(draw: st.DrawFn) -> tuple[Mask, int, int]:
    """A mask for B batch rows and H heads, with the number of queries and keys it is for."""
    T, S = draw(st.sampled_from(TOKENS))
    return draw(masks(B, H, T, S)), T, S


@FIXED
@given(placed=placed_masks(), data=st.data())
def test_keys_outside_the_range_are_seen_by_nobody(placed: tuple[Mask, int, int], data: st.DataObject) -> None:
    mask, T, S = placed
    rows = data.draw(spans(T))
    keys = mask.keys(rows, T, S)
    assert 0 <= keys.start <= keys.stop <= S
    seen = dense(mask, T, S)[:, :, rows.start : rows.stop]
    assert not seen[..., : keys.start].any()
    assert not seen[..., keys.stop :].any()


@FIXED
@given(placed=placed_masks())
def test_full_and_never_empty_are_only_claimed_when_true(placed: tuple[Mask, int, int]) -> None:
    mask, T, S = placed
    seen = dense(mask, T, S)
    assert seen.all() or not mask.is_full(T, S)
    assert seen.any(-1).all() or mask.may_be_empty(T, S)


def test_full_and_never_empty_are_claimed_where_it_matters() -> None:
    """Sound is not enough: these calls stay on the quickest path because the mask knows itself."""
    assert causal().is_full(1, 11), "one query at the end of a cache sees everything"
    assert window(11).is_full(7, 11)
    for mask in (causal(), window(3), causal() & window(3), causal() | padding_mask(coins(B, 11))):
        assert not mask.may_be_empty(7, 11)


def spans(length: int) -> st.SearchStrategy[range]:
    """A run of rows or columns that is not empty."""
    ends = st.tuples(st.integers(0, length - 1), st.integers(1, length))
    return ends.map(lambda pair: range(pair[0], max(pair[0] + 1, pair[1])))


@FIXED
@given(placed=placed_masks(), data=st.data())
def test_a_block_is_a_slice_of_the_dense_mask(placed: tuple[Mask, int, int], data: st.DataObject) -> None:
    mask, T, S = placed
    rows, cols = data.draw(spans(T)), data.draw(spans(S))
    block = mask.block(rows, cols, T, S, torch.device("cpu"))
    assert block.dtype == torch.bool
    want = dense(mask, T, S)[:, :, rows.start : rows.stop, cols.start : cols.stop]
    assert torch.equal(block.expand(want.shape), want)


@FIXED
@given(placed=placed_masks(), heads=spans(H))
def test_some_heads_are_a_slice_of_the_dense_mask(placed: tuple[Mask, int, int], heads: range) -> None:
    mask, T, S = placed
    pick = slice(heads.start, heads.stop)
    some = mask.for_heads(pick)
    some.check(B, len(heads), T, S)
    assert torch.equal(some.dense(T, S).expand(B, len(heads), T, S), dense(mask, T, S)[:, pick])


@FIXED
@given(placed=placed_masks())
def test_planes_say_over_what_the_mask_differs(placed: tuple[Mask, int, int]) -> None:
    mask, T, S = placed
    mask.check(B, H, T, S)
    shape = mask.dense(T, S).shape
    assert len(shape) == 4
    assert shape[:2] == mask.planes()


@FIXED
@given(data=st.data(), tokens=st.sampled_from(TOKENS), batch=st.sampled_from(BATCHES))
def test_and_or_combine_cell_by_cell(data: st.DataObject, tokens: tuple[int, int], batch: int) -> None:
    one, other = (data.draw(masks(batch, H, *tokens)) for _ in range(2))
    left, right = dense(one, *tokens), dense(other, *tokens)
    assert torch.equal(dense(one & other, *tokens), left & right)
    assert torch.equal(dense(one | other, *tokens), left | right)


# torch's two conventions: what torch itself computes with a mask is what we compute with the converted one.

T, S, d = 7, 11, 5


def seen_by_all(shape: tuple[int, ...]) -> Tensor:
    """Random, but nobody is left without a key: torch answers that with NaN."""
    mask = coins(*shape)
    mask[..., 0] = True
    return mask


def random_qkv() -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(B, H, n, d, generator=draws, dtype=torch.float64) for n in (T, S, S))
    return q, k, v


def as_argument(converted: Mask | Tensor) -> dict[str, Any]:
    """A bool comes back as a mask, a float as a bias."""
    return {"mask": converted} if isinstance(converted, Mask) else {"bias": converted}


# SDPA broadcasts from the right, so that three axes are (heads, T, S).
@pytest.mark.parametrize("shape", [(T, S), (H, T, S), (1, T, S), (B, H, T, S), (B, 1, 1, S), (1, H, T, S)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_from_sdpa_computes_what_sdpa_computes(shape: tuple[int, ...], kind: str) -> None:
    q, k, v = random_qkv()
    mask = seen_by_all(shape) if kind == "bool" else seen_by_all(shape).double()
    given = as_argument(from_sdpa(mask))
    torch.testing.assert_close(attention(q, k, v, **given), scaled_dot_product_attention(q, k, v, mask))


def our_masks() -> dict[str, Mask]:
    return {
        "one plane": causal() & window(4),
        "batch rows differ": causal() & padding_mask(seen_by_all((B, S))),
        "heads differ": per_head([causal(), window(2), Mask.of(seen_by_all((T, S)))]),
        "both differ": Mask.of(seen_by_all((B, H, T, S))),
    }


@pytest.mark.parametrize("name", our_masks())
def test_to_sdpa_makes_sdpa_compute_what_we_compute(name: str) -> None:
    q, k, v = random_qkv()
    mask = our_masks()[name]
    theirs = scaled_dot_product_attention(q, k, v, to_sdpa(mask, T, S))
    torch.testing.assert_close(theirs, attention(q, k, v, mask=mask))


class TorchLayer:
    """torch's layer, run by torch, and run by us on the same weights."""

    def __init__(self) -> None:
        torch.manual_seed(6)
        width = H * d
        self.layer = nn.MultiheadAttention(width, H, batch_first=True, dtype=torch.float64)
        self.x = torch.randn(B, T, width, dtype=torch.float64)
        self.y = torch.randn(B, S, width, dtype=torch.float64)

    def theirs(self, **masks: Tensor) -> Tensor:
        return self.layer(self.x, self.y, self.y, need_weights=False, **masks)[0]

    def ours(self, mask: Mask | None = None, bias: Tensor | None = None) -> Tensor:
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
def test_from_mha_computes_what_multihead_attention_computes(shape: tuple[int, ...], kind: str) -> None:
    hidden = ~seen_by_all(shape)
    mask = hidden if kind == "bool" else hidden.double()
    given = as_argument(from_mha(mask, heads=H))
    torch.testing.assert_close(TorchLayer().ours(**given), TorchLayer().theirs(attn_mask=mask))


def test_from_mha_padding_computes_what_multihead_attention_computes() -> None:
    hidden = ~seen_by_all((B, S))
    theirs = TorchLayer().theirs(key_padding_mask=hidden)
    torch.testing.assert_close(TorchLayer().ours(from_mha_padding(hidden)), theirs)


@pytest.mark.parametrize("name", our_masks())
def test_to_mha_makes_multihead_attention_compute_what_we_compute(name: str) -> None:
    mask = our_masks()[name]
    theirs = TorchLayer().theirs(attn_mask=to_mha(mask, T, S, batch=B, heads=H))
    torch.testing.assert_close(theirs, TorchLayer().ours(mask))


@pytest.mark.parametrize("convert", [from_mha_padding, lambda mask: from_mha(mask, heads=1)], ids=["padding", "mask"])
def test_integers_are_refused_or_read_as_bools(convert: Callable[[Tensor], Mask]) -> None:
    """Turning its bits around makes every integer but −1 true: such a mask would hide nothing, in silence."""
    hidden = ~seen_by_all((B, S))
    try:
        got = convert(hidden.int())
    except HeadwiseError:
        return
    assert torch.equal(got.dense(B, S), convert(hidden).dense(B, S))


# What does not fit is refused, with words that help.


def call_with(mask: Mask) -> Callable[[], object]:
    return lambda: attention(*random_qkv(), mask=mask)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "window of nothing": (lambda: window(0), "a window has a size of at least 1 and looks ahead 0 or more, got 0 and"),
    "window ahead of itself": (lambda: window(3, ahead=-1), "looks ahead 0 or more, got 3 and -1"),
    "padding of one axis": (lambda: padding_mask(coins(S)), r"\(batch, keys\), True at real tokens; got shape \(11,\)"),
    "additive padding": (lambda: padding_mask(torch.zeros(B, S)), "True where a query may look, got torch.float32"),
    "additive mask": (lambda: Mask.of(torch.zeros(T, S)), "pass additive scores as bias="),
    "documents of one axis": (lambda: document_mask(torch.zeros(S)), r"\(batch, tokens\); got shape \(11,\)"),
    "no masks": (lambda: per_head([]), "needs at least one mask"),
    "a tensor among masks": (lambda: per_head([coins(T, S)]), r"got Tensor; wrap a tensor with hw.Mask.of"),  # pyright: ignore
    "a tensor after &": (lambda: causal() & coins(T, S), "expected a mask, got Tensor"),  # pyright: ignore
    "mask of one axis": (lambda: Mask.of(coins(S)), r"\(T, S\), \(B, T, S\) or \(B, H, T, S\); got shape \(11,\)"),
    "padding too short": (
        call_with(padding_mask(coins(B, 5))),
        r"padding mask is \(2, 5\) but there are 11 keys in a batch",
    ),
    "padding for others": (call_with(padding_mask(coins(5, S))), r"\(5, 11\) but there are 11 keys in a batch of 2"),
    "documents of keys only": (
        call_with(document_mask(torch.zeros(B, S))),
        r"document numbers of the queries are \(2, 11\) but there are 7 queries",
    ),
    "too few heads": (call_with(per_head([causal()] * 2)), "has 2 masks but there are 3 heads"),
    "mask of swapped axes": (
        call_with(Mask.of(coins(S, T))),
        r"the mask is \(1, 1, 11, 7\) but the call is \(2, 3, 7, 11\)",
    ),
    "a misfit inside &": (call_with(causal() & padding_mask(coins(B, 5))), "there are 11 keys"),
    "a misfit for one head": (
        call_with(per_head([causal(), padding_mask(coins(B, 5)), causal()])),
        "there are 11 keys",
    ),
    "a bare tensor": (call_with(coins(T, S)), r"mask must be a Mask, got Tensor; wrap a tensor with hw.Mask.of"),  # pyright: ignore
    "heads that do not divide": (
        lambda: from_mha(coins(5, T, S), heads=H),
        "5 leading rows, not a multiple of 3 heads",
    ),
    "additive padding of torch": (lambda: from_mha_padding(torch.zeros(B, S)), "float key_padding_mask is a bias"),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(HeadwiseError, match=words):
        make()
