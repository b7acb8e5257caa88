"""A cache with cache policies per KV head inside the attention of a transformers model.

transformers appends keys and values to a cache, masks scores, then attends. With cache policies per KV head, these are one
operation, `PerHeadCache.attend`, because heads with other tokens need kernel calls of their own. One call of a layer:

    module.forward            past_key_values.update(k, v)     -> CacheStep: the new tokens, not stored yet
      attention function      pop_cache_step(layer)                 the step of this layer and thread
        step.attend(...)      mask of the call -> PerHeadCache.attend: store the tokens, attend per group of KV heads

Modules that do not run on transformers' attention interface compute the scores themselves. For them `update` returns the keys
and values of all tokens, with zeros for evicted ones, as one temporary tensor per layer. `step.hidden_keys` returns the
mask of the evicted tokens, and stores the new tokens.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.cache import NO_CACHE, AttendResult
from headwise.cache.per_head_cache import fake_quantize_kv, streaming_mask
from headwise.cache.sink_window_masks import flatten_and_mask
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError
from headwise.kernels import Mask, ScoreParams, ScoreRequest, run_kernel, window
from headwise.kernels.masks import CausalMask, DenseMask, PaddingMask, and_masks
from headwise.spec import AttentionSpec, CachePolicy

if TYPE_CHECKING:
    from headwise.attached.layer import AttachedLayer
    from headwise.attached.transformers_cache import PerHeadCacheLayer

_pending = threading.local()  # `step`: the last cache update of this thread, until attention takes it


@dataclass(eq=False)
class ScoreParamsProvider:
    """Score parameters of one attention call, as a cache requests them (`ScoringLayerProtocol`).

    Attributes:
        spec: The layer, with its window.
        params: Score parameters over all tokens, with the mask of the call.
    """

    spec: AttentionSpec
    params: ScoreParams
    backend: str = "auto"

    def score_params(self, q: Tensor, k: Tensor, v: Tensor, request: ScoreRequest) -> ScoreParams:
        """Return the score parameters. If the request has cache policies, evicted tokens are masked."""
        if not request.policies or request.num_keys is None:
            return self.params
        not_evicted = streaming_mask(request.policies, self.params.kv_of_head, request.num_keys, request.row_starts)
        return (
            self.params if not_evicted is None else replace(self.params, mask=and_masks(self.params.mask, not_evicted))
        )


class TextOffsets:
    """Index of the first real token of each row of a batch, shared by the layers of a cache.

    Padding is on the left. A token is real if its query attends to it, because padding is hidden from all queries.
    """

    def __init__(self) -> None:
        self.starts: Tensor | None = None  # (B,); None if no row is padded
        self.length = 0  # number of tokens seen
        self._canonical: dict[tuple[int, int | None], tuple[Mask, Mask]] = {}

    def advance(self, allowed: Tensor | None, length: int, T: int) -> Tensor | None:
        """Count T tokens after `length` tokens: (B or 1, H or 1, T, S), True at visible keys → (B,) or None."""
        if length + T > self.length:
            self._canonical.clear()
            self.starts, self.length = advance_starts(self.starts, allowed, length, T), length + T
        return self.starts

    def remove_last(self, count: int) -> None:
        """Forget the last tokens."""
        self.length -= count
        self._canonical.clear()
        self.starts = None if self.starts is None else self.starts.clamp(max=self.length)

    def reset(self) -> None:
        """Forget all tokens."""
        self.starts, self.length = None, 0
        self._canonical.clear()

    def reorder(self, rows: Tensor) -> None:
        """Select and reorder batch rows."""
        self._canonical.clear()
        if self.starts is not None:
            starts = self.starts.index_select(0, rows.to(self.starts.device))
            self.starts = starts if bool(starts.any()) else None

    def repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row."""
        self._canonical.clear()
        self.starts = None if self.starts is None else self.starts.repeat_interleave(repeats)

    def canonical_mask(self, mask: Mask | None, window_size: int | None, T: int, S: int) -> Mask:
        """Return the mask of a call as causal, window and padding masks if it is one, which kernels and caches skip."""
        if mask is None:
            return _recognize_structured_mask(None, window_size, self.starts, T, S)
        key = (id(mask), window_size)
        if key not in self._canonical:
            self._canonical[key] = mask, _recognize_structured_mask(mask, window_size, self.starts, T, S)
        return self._canonical[key][1]


def advance_starts(
    starts: Tensor | None, allowed: Tensor | None, length: int, T: int, *, is_last: bool = False
) -> Tensor | None:
    """Return the first real token of each row after T more tokens, or None if no row is padded on the left.

    `is_last`: no tokens follow these, so rows may be padded on the right: no real token counts that padding.
    """
    if allowed is None:
        return starts
    queries = torch.arange(T, device=allowed.device)
    is_real = allowed[..., queries, length + queries].any(1)  # (B or 1, T)
    if starts is None and bool(is_real.all()):
        return None
    starts = is_real.new_zeros(len(is_real), dtype=torch.long) if starts is None else starts
    is_padding = (starts == length)[:, None] & (~is_real).cumprod(1).bool()  # padding so far: (B, T)
    real_follows = is_real.flip(1).cummax(1).values.flip(1) if is_last else torch.ones_like(is_real)
    if bool((~is_real & ~is_padding & real_follows).any()):
        raise ArgumentError(
            "attention_mask: with a per-head cache, padding must be on the left of all tokens, because streaming heads count "
            "tokens. Got padding after a token. Set tokenizer.padding_side = 'left'."
        )
    starts = starts + is_padding.sum(1)
    return starts if bool(starts.any()) else None


def _recognize_structured_mask(
    mask: Mask | None, window_size: int | None, starts: Tensor | None, T: int, S: int
) -> Mask:
    canonical: Mask = CausalMask() if window_size is None else CausalMask() & window(window_size)
    dense = next((part for part in flatten_and_mask(mask) if isinstance(part, DenseMask)), None)
    if mask is None or dense is None:
        return canonical
    if starts is not None:
        columns = torch.arange(S, device=dense.allowed.device)
        canonical = canonical & PaddingMask(columns >= starts[:, None])
    expected = canonical.dense(T, S, dense.allowed.device)
    is_equal = (
        torch.equal(expected.expand_as(dense.allowed), dense.allowed) if _expands(expected, dense.allowed) else False
    )
    return canonical if is_equal else mask


def _expands(small: Tensor, large: Tensor) -> bool:
    """Return whether a tensor can be expanded to the shape of another one."""
    return all(size in (1, other) for size, other in zip(small.shape, large.shape, strict=True))


@dataclass(eq=False)
class CacheStep:
    """New tokens that a layer has passed to its cache and not attended to yet.

    Attributes:
        cache: Cache of the layer.
        k: Keys of the new tokens as the cache returned them, (B, K, T, d), or of all tokens.
        new_k: Keys of the new tokens, (B, K, T, d).
        new_v: Values of the new tokens, (B, K, T, e).
    """

    cache: "PerHeadCacheLayer"
    k: Tensor
    new_k: Tensor
    new_v: Tensor

    @property
    def num_keys(self) -> int:
        """Number of tokens including the new ones."""
        return self.cache.length + self.new_k.shape[2]

    def attend(self, layer: "AttachedLayer", q: Tensor, key: Tensor, params: ScoreParams) -> AttendResult:
        """Store the new tokens and attend: (B, H, T, d) → z (B, H, T, e)."""
        cache, T = self.cache, self.new_k.shape[2]
        if key is not self.k:
            raise UnsupportedModelError(
                f"{layer.info.name}: the layer changes its keys after the cache, which a per-head cache does not support."
            )
        starts = cache.text_offsets.advance(visible_keys_of_mask(params.mask), cache.length, T)
        mask = cache.text_offsets.canonical_mask(params.mask, cache.spec.window, T, self.num_keys)
        params = replace(params, mask=mask, kv_of_head=cache.kv_of_head)
        request = ScoreRequest(
            mask, row_starts=starts, layer=ScoreParamsProvider(cache.spec, params),
            has_listeners=layer.hook_point.has_listeners,
        )  # fmt: skip
        cache.record(self.new_k, self.new_v, starts)
        return cache.heads.attend(q, self.new_k, self.new_v, request)

    def visible_keys(self, allowed: Tensor | None) -> Tensor | None:
        """Store the new tokens. Return the keys that are not evicted, (1 or B, H, T, S), or None if no key is."""
        cache, T, S = self.cache, self.new_k.shape[2], self.num_keys
        starts = cache.text_offsets.advance(allowed, cache.length, T)
        not_evicted = streaming_mask(cache.heads.policies, cache.kv_of_head, S, starts)
        cache.record(self.new_k, self.new_v, starts)
        cache.heads.append(self.new_k, self.new_v, starts)
        return None if not_evicted is None else not_evicted.dense(T, S, self.new_k.device)


def set_cache_step(step: CacheStep | None) -> None:
    """Set the cache step that the next attention call of this thread takes."""
    _pending.step = step


def has_pending_cache_step() -> bool:
    """Return whether a layer of this thread has passed tokens to a per-head cache and not attended yet."""
    return not torch.compiler.is_compiling() and getattr(_pending, "step", None) is not None


def pop_cache_step(layer: "AttachedLayer") -> CacheStep | None:
    """Return the cache step of this attention call, or None if the call has no per-head cache."""
    if not has_pending_cache_step():
        return None
    step: CacheStep = _pending.step
    _pending.step = None
    if step.cache.address != layer.hook_point.address or step.cache.owner() is not layer.handle():
        raise HeadwiseError(
            f"cache: layer {step.cache.address} appended tokens and did not attend to them. Create a new cache."
        )
    return step


def visible_keys_of_mask(mask: Mask | None) -> Tensor | None:
    """Return the visible keys of a converted mask, (B or 1, H or 1, T, S), or None if it has no tensor."""
    return next((part.allowed for part in flatten_and_mask(mask) if isinstance(part, DenseMask)), None)


def attend_with_policies(
    layer: "AttachedLayer", q: Tensor, k: Tensor, v: Tensor, make_params: Callable[[int], ScoreParams]
) -> AttendResult:
    """Attend in a layer with cache policies, or with a per-head cache: (B, H, T, d), (B, K, S, ·) twice → z (B, H, T, e).

    `make_params` returns the score parameters for a number of keys.
    """
    step = pop_cache_step(layer)
    if step is None:
        return _attend_without_cache(layer, q, k, v, make_params(k.shape[2]))
    if not step.cache.is_dense:
        return step.attend(layer, q, k, make_params(step.num_keys))
    params = make_params(k.shape[2])
    visible = step.visible_keys(visible_keys_of_mask(params.mask))
    params = params if visible is None else replace(params, mask=and_masks(params.mask, DenseMask(visible)))
    return AttendResult(run_kernel(q, k, v, params), lambda: (k, v, params))


def _attend_without_cache(layer: "AttachedLayer", q: Tensor, k: Tensor, v: Tensor, params: ScoreParams) -> AttendResult:
    """Attend to all tokens of a call, masking those that its heads would have evicted."""
    policies = policies_of_keys(layer, k.shape[1])
    check_full_call(layer, q.shape[2], k.shape[2])
    starts = advance_starts(None, visible_keys_of_mask(params.mask), 0, q.shape[2], is_last=True)
    spec = replace(layer.spec, cache=(), window=None)
    request = ScoreRequest(params.mask, policies=policies, row_starts=starts, num_keys=k.shape[2])
    request.layer = ScoreParamsProvider(spec, params)
    quantized_k, quantized_v = fake_quantize_kv(k, policies), fake_quantize_kv(v, policies)
    result = NO_CACHE.attend(q, quantized_k, quantized_v, request)
    if layer.cache_gate is None:
        return result
    gate = layer.cache_gate[:, list(layer.spec.kv_of_head), None, None].to(result.z)  # (B, H, 1, 1)
    full = run_kernel(q, k, v, params)
    return AttendResult(result.z + gate * (full - result.z), lambda: (k, v, params))


def policies_of_keys(layer: "AttachedLayer", kv_count: int) -> tuple[CachePolicy, ...]:
    """Return the cache policies of a call's keys, which may be repeated for all heads of their group."""
    policies = layer.spec.cache_policies
    return policies if len(policies) == kv_count else tuple(policies[i] for i in layer.spec.kv_of_head)


def check_full_call(layer: "AttachedLayer", T: int, S: int) -> None:
    """Raise if a layer with cache policies is called with a cache of transformers."""
    if T != S:
        raise ArgumentError(
            f"past_key_values: {layer.info.name} has cache policies per KV head, which the dynamic and static caches of "
            f"transformers do not support. Got {S} keys for {T} queries. Pass past_key_values=hw.per_head_cache(attached) "
            f"or use attached.generate."
        )


def hide_evicted_keys(layer: "AttachedLayer", scores: Tensor, allowed: Tensor) -> Tensor | None:
    """Return scores with evicted tokens hidden, (B, H, T, S), in a layer that computes its scores itself; None if none is.

    `allowed` is True at the keys that the layer does not mask, (B or 1, H or 1, T, S).
    """
    step = pop_cache_step(layer)
    if step is not None:
        visible = step.visible_keys(allowed)
    elif layer.spec.cache:
        T, S = scores.shape[-2:]
        check_full_call(layer, T, S)
        starts = advance_starts(None, allowed, 0, T, is_last=True)
        not_evicted = streaming_mask(layer.spec.cache_policies, layer.spec.kv_of_head, S, starts)
        visible = None if not_evicted is None else not_evicted.dense(T, S, scores.device)
    else:
        return None
    if visible is None:
        return None
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
