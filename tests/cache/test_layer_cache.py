"""Layer caches: a text in pieces gives the same outputs as the full text, and each cache stores the documented tokens."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.cache import (
    CrossAttentionCache,
    DynamicCache,
    LayerCache,
    SharedKVCache,
    SlidingWindowCache,
    StaticCache,
)
from headwise.errors import HeadwiseError
from headwise.heads import MultiHeadAttention
from headwise.kernels import causal, window
from headwise.spec import AttentionSpec
from tests.contract.layers import LAYERS, WIDTH, B, assert_equal, make_layer, random_tensor

LENGTH, WINDOW = 17, 4
PIECES = {
    "one by one": [1] * LENGTH,
    "uneven": [5, 1, 3, 8],
    "all at once": [LENGTH],
    "an empty one": [6, 0, 11],
}
VARIANTS = ["plain", "grouped-query", "wide values", "sink", "softcap", "alibi", "rotary, partial", "slice",
            "cut, uneven groups", "cut, no head left"]  # fmt: skip
FULL_CACHES: dict[str, Callable[[], SharedKVCache]] = {"dynamic": DynamicCache, "static": lambda: StaticCache(LENGTH)}

each_split = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
each_variant = pytest.mark.parametrize("name", VARIANTS)


def run_in_chunks(layer: MultiHeadAttention, x: Tensor, pieces: list[int], cache: LayerCache) -> Tensor:
    return torch.cat([layer(piece, mask=causal(), cache=cache) for piece in x.split(pieces, 1)], 1)


@pytest.mark.parametrize("kind", FULL_CACHES)
@each_split
@each_variant
@torch.no_grad()
def test_cache_text_in_chunks_equals_full_text(name: str, pieces: list[int], kind: str) -> None:
    layer, x, cache = make_layer(LAYERS[name]), random_tensor(B, LENGTH, WIDTH), FULL_CACHES[kind]()
    assert_equal(run_in_chunks(layer, x, pieces, cache), layer(x, mask=causal()))
    assert cache.length == LENGTH


@each_split
@each_variant
@torch.no_grad()
def test_sliding_cache_windowed_layer_equals_window_mask(name: str, pieces: list[int]) -> None:
    """A windowed layer with a cache of at most its window equals the layer on the full text."""
    spec, x = LAYERS[name], random_tensor(B, LENGTH, WIDTH)
    sliding = make_layer(replace(spec, window=WINDOW))
    want = make_layer(spec)(x, mask=causal() & window(WINDOW))
    assert_equal(run_in_chunks(sliding, x, pieces, SlidingWindowCache(WINDOW)), want)


@torch.no_grad()
def test_sliding_cache_single_tokens_equal_window_mask() -> None:
    layer, x = make_layer(LAYERS["plain"]), random_tensor(B, LENGTH, WIDTH)
    want = layer(x, mask=causal() & window(WINDOW))
    assert_equal(run_in_chunks(layer, x, [1] * LENGTH, SlidingWindowCache(WINDOW)), want)


@torch.no_grad()
def test_cross_attention_cache_reads_source_once() -> None:
    layer, cache = make_layer(LAYERS["cross"]), CrossAttentionCache()
    x, source = random_tensor(B, LENGTH, WIDTH), random_tensor(B, 7, 13, seed=2)
    pieces = [layer(piece, source, cache=cache) for piece in x.split(5, 1)]
    assert_equal(torch.cat(pieces, 1), layer(x, source))
    assert cache.length == 7
    before = cache.kv
    layer(x, source, cache=cache)
    assert cache.kv is not None
    assert before is not None
    assert cache.kv[0] is before[0], "once there, it stays"
    with pytest.raises(HeadwiseError, match="keys of another source"):
        layer(x, torch.zeros_like(source), cache=cache)


def test_self_attention_cross_attention_cache_raises() -> None:
    with pytest.raises(HeadwiseError, match="supports only cross-attention"):
        make_layer(LAYERS["plain"])(random_tensor(B, LENGTH, WIDTH), cache=CrossAttentionCache())


# Stored tokens.

K, D, E = 3, 5, 7


def keys_values(length: int, seed: int = 0, batch: int = B) -> tuple[Tensor, Tensor]:
    return random_tensor(batch, K, length, D, seed=seed), random_tensor(batch, K, length, E, seed=seed + 100)


def append_all(cache: SharedKVCache, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Append piece by piece. Return the last output of the cache and all inputs."""
    chunks = [keys_values(length, seed) for seed, length in enumerate(lengths)]
    k = v = torch.empty(0)
    for piece in chunks:
        k, v = cache.append(*piece)
    return k, v, torch.cat([k for k, _ in chunks], 2), torch.cat([v for _, v in chunks], 2)


@pytest.mark.parametrize("lengths", [[1] * 200, [63, 1, 1], [64, 1], [65], [3, 150, 1, 600, 2]], ids=len)
def test_dynamic_cache_growing_keeps_contents(lengths: list[int]) -> None:
    k, v, all_k, all_v = append_all(DynamicCache(), lengths)
    assert torch.equal(k, all_k)
    assert torch.equal(v, all_v)


def test_dynamic_cache_many_steps_grows_by_doubling() -> None:
    cache = DynamicCache()
    sizes = []
    for step in range(300):
        cache.append(*keys_values(1, step))
        sizes.append(cache.nbytes)
    assert len(set(sizes)) == 4, "64, 128, 256, 512: few times in 300 steps"
    assert sizes[-1] == 512 * B * K * (D + E) * 8


def test_static_cache_allocates_once_and_full_raises() -> None:
    cache = StaticCache(10)
    assert cache.nbytes == 0
    cache.append(*keys_values(4))
    assert cache.nbytes == 10 * B * K * (D + E) * 8
    cache.append(*keys_values(6))
    with pytest.raises(HeadwiseError, match=r"full\. Its size is 10 tokens; it contains 10, and 1 more"):
        cache.append(*keys_values(1))
    assert cache.length == 10, "a refused token is not counted"


@pytest.mark.parametrize("lengths", [[1] * 9, [2, 5, 1, 1], [9], [3, 0, 6]], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4, 20])
def test_sliding_cache_append_returns_visible_keys(lengths: list[int], size: int) -> None:
    cache = SlidingWindowCache(size)
    chunks = [keys_values(length, seed) for seed, length in enumerate(lengths)]
    all_k = torch.cat([k for k, _ in chunks], 2)
    total = 0
    for k, v in chunks:
        announced = cache.visible_keys(k.shape[2])
        visible_k, visible_v = cache.append(k, v)
        start, total = max(0, total - (size - 1)), total + k.shape[2]
        assert torch.equal(visible_k, all_k[:, :, start:total])
        assert visible_v.shape[2] == visible_k.shape[2] == announced
    assert cache.length == 9
    assert cache.nbytes == min(size - 1, 9) * B * K * (D + E) * 8, "the next token brings its own key"


CACHE_FACTORIES: dict[str, Callable[[], SharedKVCache]] = {
    "dynamic": DynamicCache,
    "static": lambda: StaticCache(20),
    "sliding": lambda: SlidingWindowCache(6),
    "source": CrossAttentionCache,
}
each_cache = pytest.mark.parametrize("make", CACHE_FACTORIES.values(), ids=CACHE_FACTORIES)


@each_cache
def test_cache_reorder_selects_rows(make: Callable[[], SharedKVCache]) -> None:
    cache, rows = make(), torch.tensor([2, 0, 2])
    cache.reorder(rows)  # an empty cache has nothing to reorder
    k, v = keys_values(4, batch=3)
    cache.append(k, v)
    cache.reorder(rows)
    if isinstance(cache, CrossAttentionCache):
        assert cache.kv is not None
        assert torch.equal(cache.kv[0], k[rows])
        return
    more_k, more_v = keys_values(1, seed=5, batch=3)
    got_k, got_v = cache.append(more_k, more_v)
    assert torch.equal(got_k, torch.cat((k[rows], more_k), 2))
    assert torch.equal(got_v, torch.cat((v[rows], more_v), 2))


@each_cache
def test_cache_append_detaches_gradients(make: Callable[[], SharedKVCache]) -> None:
    cache = make()
    k, v = (x.requires_grad_() for x in keys_values(3))
    cache.append(k * 1, v * 1)
    if isinstance(cache, CrossAttentionCache):
        assert cache.kv is not None
        stored = cache.kv
    else:
        stored = cache.append(*keys_values(1))
    assert not any(x.requires_grad for x in stored)


@pytest.mark.parametrize("kind", ["dynamic", "static", "sliding"])
def test_cache_other_batch_size_raises(kind: str) -> None:
    cache = CACHE_FACTORIES[kind]()
    cache.append(*keys_values(2))
    with pytest.raises(HeadwiseError, match=r"batch of 2\. Got a batch of 3"):
        cache.append(*keys_values(1, batch=3))


def test_cache_size_zero_raises() -> None:
    with pytest.raises(HeadwiseError, match="size=0: a static cache"):
        StaticCache(0)
    with pytest.raises(HeadwiseError, match="size=0: a sliding cache"):
        SlidingWindowCache(0)


def test_cache_pruned_layer_stores_remaining_kv_heads() -> None:
    full = AttentionSpec(width=18, heads=9, kv_heads=3)
    bytes_of = {}
    for name, spec in {"whole": full, "cut": full.keep_heads((0, 7, 8)), "none": full.keep_heads(())}.items():
        cache = StaticCache(10)
        MultiHeadAttention(spec)(torch.zeros(1, 10, 18), cache=cache)
        bytes_of[name] = cache.nbytes
    assert bytes_of == {"whole": 10 * 3 * 4 * 4, "cut": 10 * 2 * 4 * 4, "none": 0}
