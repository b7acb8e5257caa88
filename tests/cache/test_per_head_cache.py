"""Per-head caches: each head attends to the tokens of an explicit mask, for any split of the text, and memory is bounded."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headwise.cache import DynamicCache, PerHeadCache
from headwise.cache.head_groups import PREFILL_ROWS
from headwise.cache.sink_window_masks import SinkWindowMask
from headwise.errors import HeadwiseError
from headwise.heads import AttentionCall, MultiHeadAttention
from headwise.kernels import Mask, ScoreRequest, causal, padding_mask, window
from headwise.kernels.quantization import dequantize, fake_quantize, quantize
from headwise.kernels.reference import reference
from headwise.spec import AttentionSpec, CachePolicy
from headwise.spec.cache_policy import kv_row_bytes
from tests.contract.layers import LAYERS, WIDTH, B, assert_equal, make_layer, random_tensor

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
MIXED_POLICIES = (
    CachePolicy(sink_tokens=2, window=3),
    CachePolicy(),
    CachePolicy(sink_tokens=2, window=3),
    CachePolicy(sink_tokens=0, window=1),
)

each_split = pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)


def expected_mask(spec: AttentionSpec, policies: tuple[CachePolicy, ...], T: int, starts: list[int]) -> Mask:
    """Return the mask cell by cell from the definition, (B, H, T, S)."""
    dense = torch.zeros(len(starts), max(1, len(spec.head_ids)), T, T, dtype=torch.bool)
    for b, start in enumerate(starts):
        for h, key in enumerate(spec.kv_of_head):
            for i in range(T):
                for j in range(start, i + 1):
                    policy = policies[key]
                    dense[b, h, i, j] = policy.window is None or j - start < policy.sink_tokens or i - j < policy.window
    return Mask.of(dense)


def run_in_chunks(layer: MultiHeadAttention, x: Tensor, pieces: list[int], cache: PerHeadCache) -> Tensor:
    return torch.cat([layer(piece, mask=causal(), cache=cache) for piece in x.split(pieces, 1)], 1)


@each_split
@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_per_head_cache_any_split_equals_policy_mask(name: str, pieces: list[int]) -> None:
    spec, x = LAYERS[name], random_tensor(B, LENGTH, WIDTH)
    layer, policies = make_layer(spec), MIXED_POLICIES[: len(spec.kv_head_ids)]
    want = layer(x, mask=expected_mask(spec, policies, LENGTH, [0, 0]))
    cache = PerHeadCache(spec, policies)
    assert_equal(run_in_chunks(layer, x, pieces, cache), want)
    assert cache.length == LENGTH


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "cut, no head left"])
@torch.no_grad()
def test_layer_cache_spec_without_cache_equals_policy_mask(name: str) -> None:
    """A layer whose spec has cache policies gives the same outputs without a cache."""
    spec, x = LAYERS[name], random_tensor(B, LENGTH, WIDTH)
    policies = tuple(MIXED_POLICIES[head % 4] for head in range(spec.kv_heads))
    cached_layer = make_layer(replace(spec, cache=policies))
    assert_equal(
        cached_layer(x, mask=causal()),
        make_layer(spec)(x, mask=expected_mask(spec, cached_layer.spec.cache_policies, LENGTH, [0, 0])),
    )
    cache = PerHeadCache(cached_layer.spec, cached_layer.spec.cache_policies)
    assert_equal(run_in_chunks(cached_layer, x, [4, 1, 12], cache), cached_layer(x, mask=causal()))


@each_split
@pytest.mark.parametrize("name", ["plain", "alibi", "rotary, partial", "cut, uneven groups", "window"])
@torch.no_grad()
def test_per_head_cache_left_padding_is_not_a_sink_token(name: str, pieces: list[int]) -> None:
    spec, x, starts = LAYERS[name], random_tensor(B, LENGTH, WIDTH), [7, 0]
    layer, policies = make_layer(spec), MIXED_POLICIES[: len(spec.kv_head_ids)]
    real_tokens = torch.arange(LENGTH) >= torch.tensor(starts)[:, None]
    want = layer(x, mask=expected_mask(spec, policies, LENGTH, starts))
    cache, outputs = PerHeadCache(spec, policies), []
    for piece in x.split(pieces, 1):
        end = cache.length + piece.shape[1]
        row_starts = torch.tensor([min(start, end) for start in starts])
        request = ScoreRequest(causal() & padding_mask(real_tokens[:, :end]), row_starts=row_starts)
        outputs.append(layer(piece, request=request, cache=cache))
    assert_equal(torch.cat(outputs, 1)[real_tokens], want[real_tokens])


WIDE_POLICIES = (
    CachePolicy(sink_tokens=2, window=5),
    CachePolicy(),
    CachePolicy(sink_tokens=1, window=6),
    CachePolicy(sink_tokens=3, window=8),
)


@each_split
@pytest.mark.parametrize("name", ["plain", "grouped-query", "sink", "alibi", "rotary, partial", "cut, uneven groups"])
@torch.no_grad()
def test_per_head_cache_splits_groups_on_first_eviction(name: str, pieces: list[int]) -> None:
    """Until the first eviction all heads are one group. Splitting it does not change later outputs."""
    spec, x = LAYERS[name], random_tensor(B, LENGTH, WIDTH)
    layer, policies = make_layer(spec), WIDE_POLICIES[: len(spec.kv_head_ids)]
    want = layer(x, mask=expected_mask(spec, policies, LENGTH, [0, 0]))
    cache, outputs, unsplit_steps = PerHeadCache(spec, policies), [], 0
    for piece in x.split(pieces, 1):
        before = cache.snapshot()
        layer(random_tensor(*piece.shape, seed=5), mask=causal(), cache=cache)  # a step that is undone
        cache.restore(before)
        outputs.append(layer(piece, mask=causal(), cache=cache))
        assert (len(cache.groups) == 1) == (cache.length <= 7)
        unsplit_steps += len(cache.groups) == 1
    assert_equal(torch.cat(outputs, 1), want)
    assert unsplit_steps or pieces[0] > 7
    slots = sum(64 if policy.window is None else policy.sink_tokens + policy.window for policy in policies)
    assert cache.nbytes == B * slots * (spec.head_dim + spec.value_dim) * 8


@torch.no_grad()
def test_reorder_before_and_after_group_split_keeps_rows() -> None:
    spec, x = LAYERS["plain"], random_tensor(B, LENGTH, WIDTH)
    layer, rows = make_layer(spec), torch.tensor([1, 1])
    want = layer(x[rows], mask=expected_mask(spec, WIDE_POLICIES, LENGTH, [0, 0]))
    for split_at in (4, 7, 8, 11):
        cache = PerHeadCache(spec, WIDE_POLICIES)
        run_in_chunks(layer, x[:, :split_at], [1] * split_at, cache)
        cache.reorder(rows)
        assert_equal(run_in_chunks(layer, x[rows, split_at:], [1] * (LENGTH - split_at), cache), want[:, split_at:])


def test_per_head_cache_lookahead_before_eviction_raises() -> None:
    layer, cache = make_layer(LAYERS["plain"]), PerHeadCache(LAYERS["plain"], WIDE_POLICIES)
    with pytest.raises(HeadwiseError, match="need a causal mask"):
        layer(random_tensor(B, 3, WIDTH), cache=cache)


@torch.no_grad()
def test_per_head_cache_extra_masks_and_bias_apply() -> None:
    spec, x = LAYERS["plain"], random_tensor(B, LENGTH, WIDTH)
    layer, hand = make_layer(spec), expected_mask(spec, MIXED_POLICIES, LENGTH, [0, 0])
    generator = torch.Generator().manual_seed(3)
    other = Mask.of(torch.rand(B, 4, LENGTH, LENGTH, generator=generator) < 0.6)
    bias = torch.randn(B, 4, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    want = layer(x, mask=hand & other & window(9), bias=bias)
    cache, outputs = PerHeadCache(spec, MIXED_POLICIES), []
    for piece in x.split([6, 1, 10], 1):
        rows = slice(cache.length, cache.length + piece.shape[1])
        chunk_mask = Mask.of(other.dense(LENGTH, LENGTH)[:, :, rows, : rows.stop]) & window(9) & causal()
        outputs.append(layer(piece, mask=chunk_mask, bias=bias[:, :, rows, : rows.stop], cache=cache))
    assert_equal(torch.cat(outputs, 1), want)


@torch.no_grad()
def test_per_head_cache_long_prompt_equals_policy_mask() -> None:
    spec, length = LAYERS["grouped-query"], 2 * PREFILL_ROWS + 31
    layer, x = make_layer(spec), random_tensor(1, length, WIDTH)
    policies = (CachePolicy(sink_tokens=3, window=29), CachePolicy(sink_tokens=1, window=300))
    cache = PerHeadCache(spec, policies)
    assert_equal(
        run_in_chunks(layer, x, [length - 1, 1], cache), layer(x, mask=expected_mask(spec, policies, length, [0]))
    )


@pytest.mark.parametrize("name", ["grouped-query", "rotary, partial", "window"])
@torch.no_grad()
def test_append_without_queries_equals_attended_tokens(name: str) -> None:
    """A cache filled with `append`, in two pieces, continues like a cache that attended to the same tokens."""
    spec, x = LAYERS[name], random_tensor(B, LENGTH, WIDTH)
    layer, policies, calls = make_layer(spec), MIXED_POLICIES[: len(spec.kv_head_ids)], list[AttentionCall]()
    cache, other = PerHeadCache(spec, policies), PerHeadCache(spec, policies)
    with layer.hook_point.listen(calls.append):
        run_in_chunks(layer, x[:, :9], [9], cache)
    for token_slice in (slice(0, 5), slice(5, 9)):
        other.append(calls[0].k[:, :, token_slice], calls[0].v[:, :, token_slice])
    assert other.length == 9
    assert_equal(run_in_chunks(layer, x[:, 9:], [1, 7], other), run_in_chunks(layer, x[:, 9:], [1, 7], cache))


@torch.no_grad()
def test_reorder_rows_continues_selected_rows() -> None:
    spec, x = LAYERS["plain"], random_tensor(B, LENGTH, WIDTH)
    layer, cache = make_layer(spec), PerHeadCache(spec, MIXED_POLICIES)
    run_in_chunks(layer, x[:, :9], [8, 1], cache)
    cache.reorder(torch.tensor([1, 0, 1]))
    other = x[[1, 0, 1]]
    want = layer(other, mask=expected_mask(spec, MIXED_POLICIES, LENGTH, [0, 0, 0]))[:, 9:]
    assert_equal(run_in_chunks(layer, other[:, 9:], [3, 5], cache), want)


@pytest.mark.parametrize("lost", [1, 4])
@torch.no_grad()
def test_restore_state_after_step_gives_same_outputs(lost: int) -> None:
    """Restoring works after a step of one or many tokens, because overwritten tokens are not needed or are copied."""
    spec, x = LAYERS["plain"], random_tensor(B, LENGTH, WIDTH)
    layer, cache = make_layer(spec), PerHeadCache(spec, MIXED_POLICIES)
    run_in_chunks(layer, x[:, :9], [8, 1], cache)
    state = cache.snapshot()
    layer(random_tensor(B, lost, WIDTH, seed=9), mask=causal(), cache=cache)
    cache.restore(state)
    want = layer(x, mask=expected_mask(spec, MIXED_POLICIES, LENGTH, [0, 0]))[:, 9:]
    assert_equal(run_in_chunks(layer, x[:, 9:], [1, 7], cache), want)


@pytest.mark.parametrize("starts", [None, [2, 0]])
@torch.no_grad()
def test_listener_per_head_cache_sees_full_maps(starts: list[int] | None) -> None:
    spec, x = LAYERS["grouped-query"], random_tensor(B, LENGTH, WIDTH)
    layer, policies, calls = (
        make_layer(spec),
        (CachePolicy(sink_tokens=2, window=3), CachePolicy(bits=8)),
        list[AttentionCall](),
    )
    row_starts = None if starts is None else torch.tensor(starts)
    real_tokens = torch.arange(LENGTH) >= torch.tensor(starts or [0, 0])[:, None]

    def run(listening: bool) -> Tensor:
        cache = PerHeadCache(spec, policies)
        first = ScoreRequest(causal() & padding_mask(real_tokens[:, :8]), row_starts=row_starts)
        second = ScoreRequest(causal() & padding_mask(real_tokens), row_starts=row_starts)
        layer(x[:, :8], request=first, cache=cache)
        if not listening:
            return layer(x[:, 8:], request=second, cache=cache)
        with layer.hook_point.listen(calls.append):
            return layer(x[:, 8:], request=second, cache=cache)

    assert torch.equal(run(listening=False), run(listening=True))
    maps = calls[0].maps()
    allowed = expected_mask(spec, policies, LENGTH, starts or [0, 0]).dense(LENGTH, LENGTH)[:, :, 8:]
    assert_equal(maps.sum(-1), torch.ones_like(maps.sum(-1)))
    assert (maps[~allowed] == 0).all()
    assert (maps[allowed] > 0).all()
    v = calls[0].v[:, [0, 0, 1, 1]]
    assert_equal(maps @ v, calls[0].z)


# Quantization.


def quantize_by_hand(x: Tensor, bits: int) -> Tensor:
    """Quantize number by number: s = max|x| / (2^(b−1) − 1) for each 32 channels, and s · n for the nearest integer n."""
    result = x.float().clone()
    for row in result.reshape(-1, x.shape[-1]):
        for start in range(0, len(row), 32):
            group = row[start : start + 32]
            peak, max_level = group.abs().max(), 2 ** (bits - 1) - 1
            s = peak / max_level
            group.copy_(
                torch.stack([peak * (torch.round(value / s) / max_level) for value in group]) if s > 0 else group
            )
    return result.to(x.dtype)


@pytest.mark.parametrize("d", [1, 5, 32, 64, 71])
@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
def test_quantize_any_bits_equals_reference(bits: int, d: int) -> None:
    x = random_tensor(2, 3, 4, d).float()
    x[0, 0, 0] = 0
    quantized, scales = quantize(x, bits)
    back = dequantize(quantized, scales, bits, d, torch.float32)
    assert torch.equal(back, quantize_by_hand(x, bits))
    assert torch.equal(fake_quantize(back, bits), back)
    assert torch.equal(fake_quantize(x, bits), back)
    num_bytes = quantized.numel() * quantized.element_size() + scales.numel() * scales.element_size()
    assert num_bytes == 24 * kv_row_bytes(d, bits)


@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
def test_fake_quantize_grid_values_unchanged(bits: int) -> None:
    """Multiples of a power of two up to the largest code, and a constant group, are unchanged."""
    max_level = 2 ** (bits - 1) - 1
    steps = torch.randint(-max_level, max_level + 1, (5, 32), generator=torch.Generator().manual_seed(1))
    steps[:, 0] = max_level
    x = steps * 0.125
    assert torch.equal(fake_quantize(x, bits), x)
    assert torch.equal(fake_quantize(torch.full((1, 32), -1.3), bits), torch.full((1, 32), -1.3))


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_fake_quantize_noise_falls_six_decibels_per_bit(bits: int) -> None:
    """For uniform numbers up to 1 the error is s²/12 and the signal 1/3, so each bit gives 6.02 dB."""
    x = torch.rand(4096, 32, generator=torch.Generator().manual_seed(2)) * 2 - 1
    x[:, 0] = 1.0
    noise = (fake_quantize(x, bits) - x)[:, 1:].square().mean()
    decibels = 10 * torch.log10(x[:, 1:].square().mean() / noise)
    assert decibels.item() == pytest.approx(20 * torch.log10(torch.tensor(2.0**bits - 2)).item(), abs=0.1)


def test_fake_quantize_gradient_passes_through() -> None:
    x = random_tensor(3, 8).requires_grad_()
    (fake_quantize(x, 4) * torch.arange(8)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.arange(8).double().expand(3, 8))


@each_split
@torch.no_grad()
def test_per_head_cache_quantized_equals_reference(pieces: list[int]) -> None:
    """Keys and values quantized by hand and the reference kernel give the same outputs, with or without a cache.

    The test uses float64, in which another split of the text never changes a number enough to change its code.
    """
    policies = (CachePolicy(bits=4), CachePolicy(bits=8, sink_tokens=1, window=4), CachePolicy(bits=16), CachePolicy())
    spec, x = LAYERS["wide values"], random_tensor(B, LENGTH, WIDTH)
    layer, calls = make_layer(spec), list[AttentionCall]()
    with layer.hook_point.listen(calls.append):
        layer(x, mask=expected_mask(spec, policies, LENGTH, [0, 0]))
    k, v = (
        torch.cat([x[:, i : i + 1] if policy.bits == 32 else quantize_by_hand(x[:, i : i + 1], policy.bits)
                   for i, policy in enumerate(policies)], 1)
        for x in (calls[0].k, calls[0].v)
    )  # fmt: skip
    want = layer.output_projection(reference(calls[0].q, k, v, calls[0].params))
    cache = PerHeadCache(spec, policies)
    assert_equal(run_in_chunks(layer, x, pieces, cache), want)
    assert_equal(make_layer(replace(spec, cache=policies))(x, mask=causal()), want)


# Memory.


@torch.no_grad()
def test_per_head_cache_evicted_tokens_free_memory() -> None:
    """For 600 tokens: a head with 6 + 6 channels takes 48 bytes per token, and 24 at 8 bits with its two scales."""
    spec = replace(LAYERS["plain"], head_dim=6)
    layer, x = make_layer(spec).float(), random_tensor(1, 600, WIDTH).float()
    cache = PerHeadCache(
        spec,
        (
            CachePolicy(sink_tokens=2, window=30),
            CachePolicy(),
            CachePolicy(bits=8),
            CachePolicy(bits=4, sink_tokens=0, window=32),
        ),
    )
    run_in_chunks(layer, x, [600], cache)
    assert cache.nbytes == 32 * 48 + 600 * 48 + 600 * 2 * (6 + 4) + 32 * 2 * (3 + 4)
    storage_sizes = {
        x.untyped_storage().nbytes() for group in cache.groups for buffer in (group.k, group.v) for x in buffer.storage
    }
    assert max(storage_sizes) == 600 * 24, "no tensor is a view of a larger one"


@torch.no_grad()
def test_per_head_cache_fixed_size_allocates_once() -> None:
    spec, x = LAYERS["plain"], random_tensor(B, LENGTH, WIDTH)
    layer, cache = make_layer(spec), PerHeadCache(spec, MIXED_POLICIES, size=12)
    run_in_chunks(layer, x[:, :3], [2, 1], cache)
    before = cache.groups[1].k.storage[0].data_ptr()
    run_in_chunks(layer, x[:, 3:12], [9], cache)
    assert cache.groups[1].k.storage[0].data_ptr() == before
    with pytest.raises(HeadwiseError, match=r"full\. Its size is 12 tokens; it contains 12, and 1 more"):
        layer(x[:, 12:13], mask=causal(), cache=cache)


def test_per_head_cache_invalid_use_raises() -> None:
    spec, x = LAYERS["plain"], random_tensor(B, LENGTH, WIDTH)
    with pytest.raises(HeadwiseError, match="2 policies for 4 KV heads"):
        PerHeadCache(spec, MIXED_POLICIES[:2])
    layer, cache = make_layer(spec), PerHeadCache(spec, MIXED_POLICIES)
    with pytest.raises(HeadwiseError, match="need a causal mask"):
        layer(x, cache=cache)
    layer(x, mask=causal(), cache=PerHeadCache(spec, MIXED_POLICIES))
    cache = PerHeadCache(spec, MIXED_POLICIES)
    layer(x, mask=causal(), cache=cache)
    with pytest.raises(HeadwiseError, match=r"batch of 2\. Got a batch of 1"):
        layer(x[:1], mask=causal(), cache=cache)
    with pytest.raises(HeadwiseError, match="Use a PerHeadCache"):
        make_layer(replace(spec, cache=MIXED_POLICIES))(x, mask=causal(), cache=DynamicCache())


def test_sink_window_mask_matches_definition() -> None:
    assert SinkWindowMask(1, 2).dense(4, 4)[0, 0].int().tolist() == [
        [1, 1, 1, 1],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
        [1, 0, 1, 1],
    ]
    late = SinkWindowMask(1, 1, torch.tensor([0, 2])).dense(1, 4)[:, 0, 0].int().tolist()
    assert late == [[1, 0, 0, 1], [1, 1, 1, 1]], "padding is for another mask to hide"
    assert SinkWindowMask(0, 3).key_range(range(4, 5), 6, 6) == range(2, 6)
    assert SinkWindowMask(1, 2).is_full(3, 3)
    assert not SinkWindowMask(1, 2).is_full(1, 4)
