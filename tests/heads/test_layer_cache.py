"""Caches: a text in pieces gives what the whole gives, whatever the cache; and what each keeps."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads import Cache, FixedCache, GrowingCache, MultiHeadAttention, SlidingCache, SourceCache
from headwise.heads.layer_cache import WholeCache
from headwise.kernels import causal, window
from headwise.spec import AttentionSpec
from tests.contract.layers import LAYERS, WIDTH, B, assert_equal, make_layer, numbers

LENGTH, WINDOW = 17, 4
PIECES = {
    "one by one": [1] * LENGTH,
    "uneven": [5, 1, 3, 8],
    "all at once": [LENGTH],
    "an empty one": [6, 0, 11],
}
VARIANTS = ["plain", "grouped-query", "wide values", "sink", "softcap", "alibi", "rotary, partial", "slice",
            "cut, uneven groups", "cut, no head left"]  # fmt: skip
KEEPS_ALL: dict[str, Callable[[], WholeCache]] = {"growing": GrowingCache, "fixed": lambda: FixedCache(LENGTH)}

each_way = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
each_variant = pytest.mark.parametrize("name", VARIANTS)


def in_pieces(layer: MultiHeadAttention, x: Tensor, pieces: list[int], cache: Cache) -> Tensor:
    return torch.cat([layer(piece, mask=causal(), cache=cache) for piece in x.split(pieces, 1)], 1)


@pytest.mark.parametrize("kind", KEEPS_ALL)
@each_way
@each_variant
@torch.no_grad()
def test_a_text_in_pieces_is_the_whole_text(name: str, pieces: list[int], kind: str) -> None:
    layer, x, cache = make_layer(LAYERS[name]), numbers(B, LENGTH, WIDTH), KEEPS_ALL[kind]()
    assert_equal(in_pieces(layer, x, pieces, cache), layer(x, mask=causal()))
    assert cache.length == LENGTH


@each_way
@each_variant
@torch.no_grad()
def test_a_sliding_cache_is_a_window(name: str, pieces: list[int]) -> None:
    """A layer with a window, in pieces with a cache no larger than it, is that layer over the whole text."""
    spec, x = LAYERS[name], numbers(B, LENGTH, WIDTH)
    sliding = make_layer(replace(spec, window=WINDOW))
    want = make_layer(spec)(x, mask=causal() & window(WINDOW))
    assert_equal(in_pieces(sliding, x, pieces, SlidingCache(WINDOW)), want)


@torch.no_grad()
def test_a_sliding_cache_alone_is_a_window_one_token_at_a_time() -> None:
    layer, x = make_layer(LAYERS["plain"]), numbers(B, LENGTH, WIDTH)
    want = layer(x, mask=causal() & window(WINDOW))
    assert_equal(in_pieces(layer, x, [1] * LENGTH, SlidingCache(WINDOW)), want)


@torch.no_grad()
def test_a_source_is_read_once() -> None:
    layer, cache = make_layer(LAYERS["cross"]), SourceCache()
    x, source = numbers(B, LENGTH, WIDTH), numbers(B, 7, 13, seed=2)
    pieces = [layer(piece, source, cache=cache) for piece in x.split(5, 1)]
    assert_equal(torch.cat(pieces, 1), layer(x, source))
    assert cache.length == 7
    held = cache.held
    layer(x, source, cache=cache)
    assert cache.held is not None
    assert held is not None
    assert cache.held[0] is held[0], "once there, it stays"
    with pytest.raises(HeadwiseError, match="holds the keys of another source; start a new SourceCache"):
        layer(x, torch.zeros_like(source), cache=cache)


def test_self_attention_refuses_a_source_cache() -> None:
    with pytest.raises(HeadwiseError, match="a SourceCache is for cross-attention"):
        make_layer(LAYERS["plain"])(numbers(B, LENGTH, WIDTH), cache=SourceCache())


# What is kept.

K, D, E = 3, 5, 7


def keys_values(length: int, seed: int = 0, batch: int = B) -> tuple[Tensor, Tensor]:
    return numbers(batch, K, length, D, seed=seed), numbers(batch, K, length, E, seed=seed + 100)


def fill(cache: WholeCache, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Extend piece by piece; returns what came out last and all that went in."""
    given = [keys_values(length, seed) for seed, length in enumerate(lengths)]
    k = v = torch.empty(0)
    for piece in given:
        k, v = cache.extend(*piece)
    return k, v, torch.cat([k for k, _ in given], 2), torch.cat([v for _, v in given], 2)


@pytest.mark.parametrize("lengths", [[1] * 200, [63, 1, 1], [64, 1], [65], [3, 150, 1, 600, 2]], ids=len)
def test_a_growing_cache_keeps_what_it_has_when_it_grows(lengths: list[int]) -> None:
    k, v, all_k, all_v = fill(GrowingCache(), lengths)
    assert torch.equal(k, all_k)
    assert torch.equal(v, all_v)


def test_a_growing_cache_grows_by_doubling() -> None:
    cache = GrowingCache()
    rooms = []
    for step in range(300):
        cache.extend(*keys_values(1, step))
        rooms.append(cache.bytes)
    assert len(set(rooms)) == 4, "64, 128, 256, 512: few times in 300 steps"
    assert rooms[-1] == 512 * B * K * (D + E) * 8


def test_a_fixed_cache_takes_its_memory_once_and_says_when_it_is_full() -> None:
    cache = FixedCache(10)
    assert cache.bytes == 0
    cache.extend(*keys_values(4))
    assert cache.bytes == 10 * B * K * (D + E) * 8
    cache.extend(*keys_values(6))
    with pytest.raises(
        HeadwiseError, match="the cache is full: it holds 10 tokens, 10 are there and 1 more came; make it larger"
    ):
        cache.extend(*keys_values(1))
    assert cache.length == 10, "a refused token is not counted"


@pytest.mark.parametrize("lengths", [[1] * 9, [2, 5, 1, 1], [9], [3, 0, 6]], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4, 20])
def test_a_sliding_cache_shows_what_the_new_tokens_windows_can_see(lengths: list[int], size: int) -> None:
    cache = SlidingCache(size)
    given = [keys_values(length, seed) for seed, length in enumerate(lengths)]
    all_k = torch.cat([k for k, _ in given], 2)
    seen = 0
    for k, v in given:
        announced = cache.visible(k.shape[2])
        shown_k, shown_v = cache.extend(k, v)
        start, seen = max(0, seen - (size - 1)), seen + k.shape[2]
        assert torch.equal(shown_k, all_k[:, :, start:seen])
        assert shown_v.shape[2] == shown_k.shape[2] == announced
    assert cache.length == 9
    assert cache.bytes == min(size - 1, 9) * B * K * (D + E) * 8, "the next token brings its own key"


MAKERS: dict[str, Callable[[], WholeCache]] = {
    "growing": GrowingCache,
    "fixed": lambda: FixedCache(20),
    "sliding": lambda: SlidingCache(6),
    "source": SourceCache,
}
each_cache = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@each_cache
def test_rows_are_reordered(make: Callable[[], WholeCache]) -> None:
    cache, rows = make(), torch.tensor([2, 0, 2])
    cache.reorder(rows)  # an empty one has nothing to reorder
    k, v = keys_values(4, batch=3)
    cache.extend(k, v)
    cache.reorder(rows)
    if isinstance(cache, SourceCache):
        assert cache.held is not None
        assert torch.equal(cache.held[0], k[rows])
        return
    more_k, more_v = keys_values(1, seed=5, batch=3)
    got_k, got_v = cache.extend(more_k, more_v)
    assert torch.equal(got_k, torch.cat((k[rows], more_k), 2))
    assert torch.equal(got_v, torch.cat((v[rows], more_v), 2))


@each_cache
def test_caches_hold_numbers_not_graphs(make: Callable[[], WholeCache]) -> None:
    cache = make()
    k, v = (x.requires_grad_() for x in keys_values(3))
    cache.extend(k * 1, v * 1)
    if isinstance(cache, SourceCache):
        assert cache.held is not None
        shown = cache.held
    else:
        shown = cache.extend(*keys_values(1))
    assert not any(x.requires_grad for x in shown)


@pytest.mark.parametrize("kind", ["growing", "fixed", "sliding"])
def test_a_batch_of_another_size_needs_a_new_cache(kind: str) -> None:
    cache = MAKERS[kind]()
    cache.extend(*keys_values(2))
    with pytest.raises(HeadwiseError, match="the cache holds a batch of 2, got 3; start a new cache for a new batch"):
        cache.extend(*keys_values(1, batch=3))


def test_a_cache_holds_at_least_one_token() -> None:
    with pytest.raises(HeadwiseError, match="a cache holds at least 1 token, got size 0"):
        FixedCache(0)
    with pytest.raises(HeadwiseError, match="a sliding cache keeps at least 1 token, got size 0"):
        SlidingCache(0)


def test_a_pruned_layer_caches_only_the_keys_it_still_reads() -> None:
    whole = AttentionSpec(width=18, heads=9, kv_heads=3)
    bytes_of = {}
    for name, spec in {"whole": whole, "cut": whole.keep((0, 7, 8)), "none": whole.keep(())}.items():
        cache = FixedCache(10)
        MultiHeadAttention(spec)(torch.zeros(1, 10, 18), cache=cache)
        bytes_of[name] = cache.bytes
    assert bytes_of == {"whole": 10 * 3 * 4 * 4, "cut": 10 * 2 * 4 * 4, "none": 0}
