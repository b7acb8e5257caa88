"""Caches by head: each head sees just what a mask drawn by hand lets it see, however the text is fed; and what is held."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import HeadCache, MultiHeadAttention, Seen
from headwise.heads.head_groups import ROWS
from headwise.kernels import Mask, causal, padding_mask, window
from headwise.kernels.quantization import from_codes, rounded, to_codes
from headwise.kernels.reference import reference
from headwise.kernels.sink_window_masks import Streaming
from headwise.spec import AttentionSpec, Keeps
from headwise.spec.cache_policy import bytes_of_a_row
from tests.contract.layers import LAYERS, WIDTH, B, assert_equal, make_layer, numbers

LENGTH = 17
PIECES = {
    "one by one": [1] * LENGTH,
    "uneven": [5, 1, 3, 8],
    "all at once": [LENGTH],
    "an empty one": [6, 0, 11],
    "many, then one by one": [11, 1, 1, 1, 1, 1, 1],
}
VARIANTS = ["plain", "grouped-query", "multi-query", "wide values", "sink", "softcap", "alibi", "rotary, partial", "slice",
            "window", "gated", "cut", "cut, alibi", "cut, uneven groups", "cut, no head left"]  # fmt: skip
MIXED = (Keeps(first=2, last=3), Keeps(), Keeps(first=2, last=3), Keeps(first=0, last=1))

each_way = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)


def seen_by_hand(spec: AttentionSpec, keeps: tuple[Keeps, ...], T: int, starts: list[int]) -> Mask:
    """(B, H, T, S), cell by cell, from the definition."""
    dense = torch.zeros(len(starts), max(1, len(spec.head_ids)), T, T, dtype=torch.bool)
    for b, start in enumerate(starts):
        for h, key in enumerate(spec.kv_of_head):
            for i in range(T):
                for j in range(start, i + 1):
                    one = keeps[key]
                    dense[b, h, i, j] = one.last is None or j - start < one.first or i - j < one.last
    return Mask.of(dense)


def in_pieces(layer: MultiHeadAttention, x: Tensor, pieces: list[int], cache: HeadCache) -> Tensor:
    return torch.cat([layer(piece, mask=causal(), cache=cache) for piece in x.split(pieces, 1)], 1)


@each_way
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_each_head_sees_what_it_keeps(name: str, pieces: list[int]) -> None:
    spec, x = LAYERS[name], numbers(B, LENGTH, WIDTH)
    layer, keeps = make_layer(spec), MIXED[: len(spec.kv_ids)]
    want = layer(x, mask=seen_by_hand(spec, keeps, LENGTH, [0, 0]))
    cache = HeadCache(spec, keeps)
    assert_equal(in_pieces(layer, x, pieces, cache), want)
    assert cache.length == LENGTH


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "cut, no head left"])
@torch.no_grad()
def test_a_layer_that_says_so_needs_no_cache(name: str) -> None:
    """The same numbers from the layer whose spec says what its heads keep, without any cache."""
    spec, x = LAYERS[name], numbers(B, LENGTH, WIDTH)
    every = tuple(MIXED[number % 4] for number in range(spec.kv_heads))
    says = make_layer(replace(spec, cache=every))
    assert_equal(says(x, mask=causal()), make_layer(spec)(x, mask=seen_by_hand(spec, says.spec.keeps, LENGTH, [0, 0])))
    cache = HeadCache(says.spec, says.spec.keeps)
    assert_equal(in_pieces(says, x, [4, 1, 12], cache), says(x, mask=causal()))


@each_way
@pytest.mark.parametrize("name", ["plain", "alibi", "rotary, partial", "cut, uneven groups", "window"])
@torch.no_grad()
def test_padding_on_the_left_is_nobody_s_first_token(name: str, pieces: list[int]) -> None:
    spec, x, starts = LAYERS[name], numbers(B, LENGTH, WIDTH), [7, 0]
    layer, keeps = make_layer(spec), MIXED[: len(spec.kv_ids)]
    real = torch.arange(LENGTH) >= torch.tensor(starts)[:, None]
    want = layer(x, mask=seen_by_hand(spec, keeps, LENGTH, starts))
    cache, made = HeadCache(spec, keeps), []
    for piece in x.split(pieces, 1):
        end = cache.length + piece.shape[1]
        begins = torch.tensor([min(start, end) for start in starts])
        made.append(layer(piece, mask=causal() & padding_mask(real[:, :end]), cache=cache, starts=begins))
    assert_equal(torch.cat(made, 1)[real], want[real])


WIDE_ROOMS = (Keeps(first=2, last=5), Keeps(), Keeps(first=1, last=6), Keeps(first=3, last=8))


@each_way
@pytest.mark.parametrize("name", ["plain", "grouped-query", "sink", "alibi", "rotary, partial", "cut, uneven groups"])
@torch.no_grad()
def test_heads_part_ways_when_one_forgets(name: str, pieces: list[int]) -> None:
    """Until then all are one part, and one call; with what is held afterwards they go on as if they had never been."""
    spec, x = LAYERS[name], numbers(B, LENGTH, WIDTH)
    layer, keeps = make_layer(spec), WIDE_ROOMS[: len(spec.kv_ids)]
    want = layer(x, mask=seen_by_hand(spec, keeps, LENGTH, [0, 0]))
    cache, made, together = HeadCache(spec, keeps), [], 0
    for piece in x.split(pieces, 1):
        before = cache.state
        layer(numbers(*piece.shape, seed=5), mask=causal(), cache=cache)  # a step that is taken back
        cache.state = before
        made.append(layer(piece, mask=causal(), cache=cache))
        assert (len(cache.parts) == 1) == (cache.length <= 7)
        together += len(cache.parts) == 1
    assert_equal(torch.cat(made, 1), want)
    assert together or pieces[0] > 7
    rooms = sum(64 if one.last is None else one.first + one.last for one in keeps)
    assert cache.bytes == B * rooms * (spec.head_dim + spec.value_dim) * 8


@torch.no_grad()
def test_rows_are_reordered_before_and_after_heads_part_ways() -> None:
    spec, x = LAYERS["plain"], numbers(B, LENGTH, WIDTH)
    layer, rows = make_layer(spec), torch.tensor([1, 1])
    want = layer(x[rows], mask=seen_by_hand(spec, WIDE_ROOMS, LENGTH, [0, 0]))
    for turn in (4, 7, 8, 11):
        cache = HeadCache(spec, WIDE_ROOMS)
        in_pieces(layer, x[:, :turn], [1] * turn, cache)
        cache.reorder(rows)
        assert_equal(in_pieces(layer, x[rows, turn:], [1] * (LENGTH - turn), cache), want[:, turn:])


def test_heads_that_will_forget_must_not_look_ahead_before() -> None:
    layer, cache = make_layer(LAYERS["plain"]), HeadCache(LAYERS["plain"], WIDE_ROOMS)
    with pytest.raises(HeadwiseError, match="must not look ahead"):
        layer(numbers(B, 3, WIDTH), cache=cache)


@torch.no_grad()
def test_other_masks_and_biases_come_on_top() -> None:
    spec, x = LAYERS["plain"], numbers(B, LENGTH, WIDTH)
    layer, hand = make_layer(spec), seen_by_hand(spec, MIXED, LENGTH, [0, 0])
    draws = torch.Generator().manual_seed(3)
    other = Mask.of(torch.rand(B, 4, LENGTH, LENGTH, generator=draws) < 0.6)
    bias = torch.randn(B, 4, LENGTH, LENGTH, generator=draws, dtype=torch.float64)
    want = layer(x, mask=hand & other & window(9), bias=bias)
    cache, made = HeadCache(spec, MIXED), []
    for piece in x.split([6, 1, 10], 1):
        rows = slice(cache.length, cache.length + piece.shape[1])
        here = Mask.of(other.dense(LENGTH, LENGTH)[:, :, rows, : rows.stop]) & window(9) & causal()
        made.append(layer(piece, mask=here, bias=bias[:, :, rows, : rows.stop], cache=cache))
    assert_equal(torch.cat(made, 1), want)


@torch.no_grad()
def test_a_long_prompt_goes_in_blocks_of_rows() -> None:
    spec, length = LAYERS["grouped-query"], 2 * ROWS + 31
    layer, x = make_layer(spec), numbers(1, length, WIDTH)
    keeps = (Keeps(first=3, last=29), Keeps(first=1, last=300))
    cache = HeadCache(spec, keeps)
    assert_equal(in_pieces(layer, x, [length - 1, 1], cache), layer(x, mask=seen_by_hand(spec, keeps, length, [0])))


@pytest.mark.parametrize("name", ["grouped-query", "rotary, partial", "window"])
@torch.no_grad()
def test_tokens_are_kept_that_nobody_asks_about(name: str) -> None:
    """Keys and values of another cache's first tokens, in two pieces: then both say the same."""
    spec, x = LAYERS[name], numbers(B, LENGTH, WIDTH)
    layer, keeps, heard = make_layer(spec), MIXED[: len(spec.kv_ids)], list[Seen]()
    cache, other = HeadCache(spec, keeps), HeadCache(spec, keeps)
    with layer.site.listen(heard.append):
        in_pieces(layer, x[:, :9], [9], cache)
    for some in (slice(0, 5), slice(5, 9)):
        other.keep(heard[0].k[:, :, some], heard[0].v[:, :, some])
    assert other.length == 9
    assert_equal(in_pieces(layer, x[:, 9:], [1, 7], other), in_pieces(layer, x[:, 9:], [1, 7], cache))


@torch.no_grad()
def test_rows_are_reordered() -> None:
    spec, x = LAYERS["plain"], numbers(B, LENGTH, WIDTH)
    layer, cache = make_layer(spec), HeadCache(spec, MIXED)
    in_pieces(layer, x[:, :9], [8, 1], cache)
    cache.reorder(torch.tensor([1, 0, 1]))
    other = x[[1, 0, 1]]
    want = layer(other, mask=seen_by_hand(spec, MIXED, LENGTH, [0, 0, 0]))[:, 9:]
    assert_equal(in_pieces(layer, other[:, 9:], [3, 5], cache), want)


@pytest.mark.parametrize("lost", [1, 4])
@torch.no_grad()
def test_a_step_is_taken_back(lost: int) -> None:
    """Many or one: what a step wrote over is not needed, or is there again."""
    spec, x = LAYERS["plain"], numbers(B, LENGTH, WIDTH)
    layer, cache = make_layer(spec), HeadCache(spec, MIXED)
    in_pieces(layer, x[:, :9], [8, 1], cache)
    state = cache.state
    layer(numbers(B, lost, WIDTH, seed=9), mask=causal(), cache=cache)
    cache.state = state
    want = layer(x, mask=seen_by_hand(spec, MIXED, LENGTH, [0, 0]))[:, 9:]
    assert_equal(in_pieces(layer, x[:, 9:], [1, 7], cache), want)


@pytest.mark.parametrize("starts", [None, [2, 0]])
@torch.no_grad()
def test_who_listens_sees_maps_over_all_places(starts: list[int] | None) -> None:
    spec, x = LAYERS["grouped-query"], numbers(B, LENGTH, WIDTH)
    layer, keeps, heard = make_layer(spec), (Keeps(first=2, last=3), Keeps(bits=8)), list[Seen]()
    begins = None if starts is None else torch.tensor(starts)
    real = torch.arange(LENGTH) >= torch.tensor(starts or [0, 0])[:, None]

    def run(listening: bool) -> Tensor:
        cache = HeadCache(spec, keeps)
        layer(x[:, :8], mask=causal() & padding_mask(real[:, :8]), cache=cache, starts=begins)
        if not listening:
            return layer(x[:, 8:], mask=causal() & padding_mask(real), cache=cache, starts=begins)
        with layer.site.listen(heard.append):
            return layer(x[:, 8:], mask=causal() & padding_mask(real), cache=cache, starts=begins)

    assert torch.equal(run(listening=False), run(listening=True))
    maps = heard[0].maps()
    allowed = seen_by_hand(spec, keeps, LENGTH, starts or [0, 0]).dense(LENGTH, LENGTH)[:, :, 8:]
    assert_equal(maps.sum(-1), torch.ones_like(maps.sum(-1)))
    assert (maps[~allowed] == 0).all()
    assert (maps[allowed] > 0).all()
    v = heard[0].v[:, [0, 0, 1, 1]]
    assert_equal(maps @ v, heard[0].z)


# Bits.


def quantised_by_hand(x: Tensor, bits: int) -> Tensor:
    """Number by number: s = max|x| / (2^(b−1) − 1) of each 32 channels, s · n of the nearest n: max|x| · (n / most)."""
    made = x.float().clone()
    for row in made.reshape(-1, x.shape[-1]):
        for start in range(0, len(row), 32):
            group = row[start : start + 32]
            peak, most = group.abs().max(), 2 ** (bits - 1) - 1
            s = peak / most
            group.copy_(torch.stack([peak * (torch.round(value / s) / most) for value in group]) if s > 0 else group)
    return made.to(x.dtype)


@pytest.mark.parametrize("d", [1, 5, 32, 64, 71])
@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
def test_few_bits(bits: int, d: int) -> None:
    x = numbers(2, 3, 4, d).float()
    x[0, 0, 0] = 0
    codes, scales = to_codes(x, bits)
    back = from_codes(codes, scales, bits, d, torch.float32)
    assert torch.equal(back, quantised_by_hand(x, bits))
    assert torch.equal(rounded(back, bits), back)
    assert torch.equal(rounded(x, bits), back)
    held = codes.numel() * codes.element_size() + scales.numel() * scales.element_size()
    assert held == 24 * bytes_of_a_row(d, bits)


@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
def test_numbers_on_the_grid_stay(bits: int) -> None:
    """Multiples of a power of two, the largest of them being the grid's; and a constant group."""
    most = 2 ** (bits - 1) - 1
    steps = torch.randint(-most, most + 1, (5, 32), generator=torch.Generator().manual_seed(1))
    steps[:, 0] = most
    x = steps * 0.125
    assert torch.equal(rounded(x, bits), x)
    assert torch.equal(rounded(torch.full((1, 32), -1.3), bits), torch.full((1, 32), -1.3))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_noise_falls_by_six_decibels_a_bit(bits: int) -> None:
    """Uniform numbers: the error of a step s is s²/12, of numbers up to 1 a third; 6.02 dB for each bit."""
    x = torch.rand(4096, 32, generator=torch.Generator().manual_seed(2)) * 2 - 1
    x[:, 0] = 1.0
    noise = (rounded(x, bits) - x)[:, 1:].square().mean()
    decibels = 10 * torch.log10(x[:, 1:].square().mean() / noise)
    assert decibels.item() == pytest.approx(20 * torch.log10(torch.tensor(2.0**bits - 2)).item(), abs=0.1)


def test_gradients_pass_through_rounding() -> None:
    x = numbers(3, 8).requires_grad_()
    (rounded(x, 4) * torch.arange(8)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.arange(8).double().expand(3, 8))


@each_way
@torch.no_grad()
def test_few_bits_are_the_plain_reference(pieces: list[int]) -> None:
    """Keys and values rounded by hand, then the reference kernel: the same, fed anyhow, with and without a cache.

    In float64, where feeding in other pieces moves no number so far that it would be rounded to another step.
    """
    keeps = (Keeps(bits=4), Keeps(bits=8, first=1, last=4), Keeps(bits=16), Keeps())
    spec, x = LAYERS["wide values"], numbers(B, LENGTH, WIDTH)
    layer, heard = make_layer(spec), list[Seen]()
    with layer.site.listen(heard.append):
        layer(x, mask=seen_by_hand(spec, keeps, LENGTH, [0, 0]))
    k, v = (
        torch.cat([x[:, i : i + 1] if one.bits == 32 else quantised_by_hand(x[:, i : i + 1], one.bits)
                   for i, one in enumerate(keeps)], 1)
        for x in (heard[0].k, heard[0].v)
    )  # fmt: skip
    want = layer.write(reference(heard[0].q, k, v, heard[0].terms))
    cache = HeadCache(spec, keeps)
    assert_equal(in_pieces(layer, x, pieces, cache), want)
    assert_equal(make_layer(replace(spec, cache=keeps))(x, mask=causal()), want)


# What is held.


@torch.no_grad()
def test_what_is_forgotten_is_not_held() -> None:
    """Counted by hand: 600 tokens; a head of 6 + 6 channels takes 48 bytes a token, 24 at 8 bits with its two scales."""
    spec = replace(LAYERS["plain"], head_dim=6)
    layer, x = make_layer(spec).float(), numbers(1, 600, WIDTH).float()
    cache = HeadCache(spec, (Keeps(first=2, last=30), Keeps(), Keeps(bits=8), Keeps(bits=4, first=0, last=32)))
    in_pieces(layer, x, [600], cache)
    assert cache.bytes == 32 * 48 + 600 * 48 + 600 * 2 * (6 + 4) + 32 * 2 * (3 + 4)
    held = {x.untyped_storage().nbytes() for part in cache.parts for shelf in (part.k, part.v) for x in shelf.held}
    assert max(held) == 600 * 24, "no tensor is a view of a larger one"


@torch.no_grad()
def test_a_fixed_size_is_taken_once() -> None:
    spec, x = LAYERS["plain"], numbers(B, LENGTH, WIDTH)
    layer, cache = make_layer(spec), HeadCache(spec, MIXED, size=12)
    in_pieces(layer, x[:, :3], [2, 1], cache)
    before = cache.parts[1].k.held[0].data_ptr()
    in_pieces(layer, x[:, 3:12], [9], cache)
    assert cache.parts[1].k.held[0].data_ptr() == before
    with pytest.raises(HeadwiseError, match="the cache is full: it holds 12 tokens, 12 are there and 1 more came"):
        layer(x[:, 12:13], mask=causal(), cache=cache)


def test_refused() -> None:
    spec, x = LAYERS["plain"], numbers(B, LENGTH, WIDTH)
    with pytest.raises(HeadwiseError, match="4 key heads; it was told what 2 of them keep"):
        HeadCache(spec, MIXED[:2])
    layer, cache = make_layer(spec), HeadCache(spec, MIXED)
    with pytest.raises(HeadwiseError, match=r"must not look ahead; pass mask=hw\.causal"):
        layer(x, cache=cache)
    layer(x, mask=causal(), cache=HeadCache(spec, MIXED))
    cache = HeadCache(spec, MIXED)
    layer(x, mask=causal(), cache=cache)
    with pytest.raises(HeadwiseError, match="the cache holds a batch of 2, got 1"):
        layer(x[:1], mask=causal(), cache=cache)
    from headwise.heads import GrowingCache

    with pytest.raises(HeadwiseError, match="heads of this layer keep different things; give it a HeadCache"):
        make_layer(replace(spec, cache=MIXED))(x, mask=causal(), cache=GrowingCache())


def test_the_mask_of_a_streaming_head() -> None:
    assert Streaming(1, 2).dense(4, 4)[0, 0].int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]]
    late = Streaming(1, 1, torch.tensor([0, 2])).dense(1, 4)[:, 0, 0].int().tolist()
    assert late == [[1, 0, 0, 1], [1, 1, 1, 1]], "padding is for another mask to hide"
    assert Streaming(0, 3).keys(range(4, 5), 6, 6) == range(2, 6)
    assert Streaming(1, 2).is_full(3, 3)
    assert not Streaming(1, 2).is_full(1, 4)
