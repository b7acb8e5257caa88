"""`PerHeadTransformersCache`: a transformers cache whose KV heads keep different tokens, at different bits.

Each layer holds a `headwise.cache.PerHeadCache`. `headwise.attached.cache_step` explains how attention uses it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from headwise.attached.cache_step import CacheStep, TextOffsets, set_cache_step
from headwise.cache import CacheState, PerHeadCache
from headwise.errors import ArgumentError, HeadwiseError, UnsupportedModelError
from headwise.spec import AttentionSpec, CachePolicy, LayerAddress


class PerHeadCacheLayer(CacheLayerMixin):
    """Cache of one attention layer, with a cache policy for each of its KV heads.

    Args:
        address: Address of the layer.
        spec: The layer, with its window.
        policies: One policy per KV head of the layer.
        text_offsets: First real token of each row, shared by the layers of a cache.
        owner: Returns the handle of the model, or None if it was collected.
        is_dense: Whether `update` returns the keys and values of all tokens, for modules that compute scores themselves.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        address: LayerAddress,
        spec: AttentionSpec,
        policies: tuple[CachePolicy, ...],
        text_offsets: TextOffsets,
        owner: Callable[[], Any],
        *,
        is_dense: bool,
    ) -> None:
        super().__init__()
        self.address, self.spec, self.policies, self.text_offsets = address, spec, policies, text_offsets
        self.owner, self.is_dense = owner, is_dense
        self.record_past = False
        self._last_step: tuple[CacheState, Tensor, Tensor, Tensor | None] | None = None
        self._empty_length = 0  # tokens of a layer without heads
        self.heads = PerHeadCache(spec, policies)
        self.kv_of_head = spec.kv_of_head

    @property
    def length(self) -> int:
        """Number of tokens seen, evicted tokens included."""
        return self.heads.length if self.policies else self._empty_length

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        recorded = () if self._last_step is None else self._last_step[1:3]
        return self.heads.nbytes + sum(x.numel() * x.element_size() for x in recorded)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Create the cache for the number of KV heads that the layer passes to it."""
        self.dtype, self.device = key_states.dtype, key_states.device
        count, spec = key_states.shape[1], self.spec
        if self.policies and count == len(spec.head_ids) != len(spec.kv_head_ids):  # each head has its own keys
            policies = tuple(self.policies[kv_index] for kv_index in spec.kv_of_head)
            repeated = AttentionSpec(spec.width, count, spec.head_dim, value_dim=spec.value_dim, window=spec.window)
            self.heads, self.kv_of_head = PerHeadCache(repeated, policies), repeated.kv_of_head
        elif self.policies and count != len(spec.kv_head_ids):
            raise UnsupportedModelError(
                f"cache: layer {self.address} has {len(spec.kv_head_ids)} KV heads, but passes {count} to its cache: "
                f"its heads share the cached rows (latent attention), or the model was pruned after this cache was made."
            )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Pass new tokens to the attention function, which stores them: (B, K, T, ·) twice."""
        self._check_owner()
        if not self.policies:  # a layer without heads
            self._empty_length += key_states.shape[2]
            return key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        key_states, value_states = key_states.detach(), value_states.detach()
        if self.is_dense:
            keys, values = self.heads.dense_kv(key_states, value_states, self.text_offsets.starts)
        else:
            keys, values = key_states.view_as(key_states), value_states
        set_cache_step(CacheStep(self, keys, key_states, value_states))
        return keys, values

    def _check_owner(self) -> None:
        handle = self.owner()
        if handle is None or not handle.is_attached:
            raise HeadwiseError(
                "past_key_values: the model of this per-head cache is not attached any more. Attach it again with "
                "hw.attach(model), and make a new cache."
            )
        if torch.compiler.is_compiling():
            raise UnsupportedModelError(
                "past_key_values: a per-head cache cannot run in compiled code. Call the model without torch.compile."
            )

    # Sizes, which masks and positions are derived from.

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the first key of a mask, which covers all tokens, evicted ones too."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.length

    def get_max_length(self) -> int:
        """Return −1: the number of tokens is not limited."""
        return -1

    # Beams, copies and removal of tokens.

    def reset(self) -> None:
        """Remove all tokens and release the memory."""
        self.heads, self.kv_of_head = PerHeadCache(self.spec, self.policies), self.spec.kv_of_head
        self._empty_length, self._last_step, self.is_initialized = 0, None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select and reorder batch rows."""
        self._last_step = None
        if self.is_initialized:
            self.heads.reorder(beam_idx.to(self.device))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row."""
        if self.is_initialized and self.heads.batch is not None:
            self.reorder_cache(torch.arange(self.heads.batch, device=self.device).repeat_interleave(repeats))

    @property
    def is_croppable(self) -> bool:
        """Whether the last tokens can be removed."""
        return self.record_past or not self.heads.has_evicted

    def activate_past_recording(self) -> None:
        """Keep the tokens of the last call until `crop`, so that tokens of it can be removed."""
        self.record_past = True

    def record(self, k: Tensor, v: Tensor, starts: Tensor | None) -> None:
        """Record a call before its tokens are stored, if recording is active."""
        self._last_step = None
        if self.record_past:
            self._last_step = (self.heads.snapshot(), k, v, starts)
            for group in self.heads.groups if self.is_dense else ():  # `append` would write into the snapshot
                group.k.clone_storage()
                group.v.clone_storage()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, given as a negative number. After an eviction only tokens of the last recorded call."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"crop: the number of tokens to remove must be negative, as in transformers. Got {tokens_to_remove}."
            )
        count, last_step, self._last_step = -tokens_to_remove, self._last_step, None
        if not count:
            return
        if count > self.length:
            raise ArgumentError(f"crop: {count} tokens cannot be removed. The cache contains {self.length}.")
        if not self.policies:
            self._empty_length -= count
        elif not self.heads.has_evicted:
            self.heads.remove_last(count)
        elif last_step is None or last_step[1].shape[2] < count:
            raise ArgumentError(
                f"crop: {count} tokens cannot be removed, because streaming KV heads have evicted tokens that would be "
                f"visible again. Create a new cache, or call activate_past_recording() before the last call."
            )
        else:
            state, k, v, starts = last_step
            self.heads.restore(state)
            remaining = k.shape[2] - count
            if remaining:
                self.heads.append(k[:, :, :remaining], v[:, :, :remaining], starts)

    def offload(self) -> None:
        """Raise: offloading is not supported."""
        raise UnsupportedModelError("cache: a per-head cache cannot be offloaded. Use it without offloading.")

    prefetch = offload


class PerHeadTransformersCache(Cache):
    """A transformers cache with cache policies per KV head, made by `hw.per_head_cache`."""

    def __init__(self, layers: list[Any], text_offsets: TextOffsets) -> None:
        super().__init__(layers=layers)
        self._text_offsets = text_offsets

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(_layer_bytes(layer) for layer in self.layers)

    def reset(self) -> None:
        """Remove all tokens and release the memory."""
        super().reset()
        self._text_offsets.reset()

    def reorder_cache(self, beam_idx: Any) -> None:
        """Select and reorder batch rows."""
        super().reorder_cache(beam_idx)
        self._text_offsets.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select batch rows."""
        super().batch_select_indices(indices)
        self._text_offsets.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row."""
        super().batch_repeat_interleave(repeats)
        self._text_offsets.repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, given as a negative number."""
        super().crop(tokens_to_remove)
        self._text_offsets.remove_last(-tokens_to_remove)


class PerHeadEncoderDecoderCache(EncoderDecoderCache):
    """Cache of an encoder-decoder whose self-attention has cache policies per KV head."""

    def __init__(self, self_attention_cache: PerHeadTransformersCache, cross_attention_cache: Cache) -> None:
        super().__init__(self_attention_cache, cross_attention_cache)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, cross-attention included."""
        cross = sum(_layer_bytes(layer) for layer in self.cross_attention_cache.layers)
        return self.self_attention_cache.nbytes + cross  # pyright: ignore[reportAttributeAccessIssue]

    def check_dynamic_cache(self, method: str) -> None:
        """All operations of a dynamic cache are supported."""


def _layer_bytes(layer: Any) -> int:
    """Return the bytes of a layer of a cache."""
    if isinstance(layer, PerHeadCacheLayer):
        return layer.nbytes
    states = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    for name in ("conv_states", "recurrent_states"):
        states += list(getattr(layer, name, {}).values())
    return sum(x.numel() * x.element_size() for x in states if isinstance(x, Tensor))


def make_transformers_cache(
    model: Any, cache_layers: dict[int, Callable[[TextOffsets], PerHeadCacheLayer]]
) -> PerHeadTransformersCache | PerHeadEncoderDecoderCache:
    """Make a cache for a transformers model, with these layers by their index and the model's own layers elsewhere."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "num_kv_shared_layers", None):
        raise UnsupportedModelError(
            f"{type(model).__name__}: some layers use the keys of other layers, which a per-head cache does not support."
        )
    layers: list[Any] = list(DynamicCache(config=config).layers)
    layers += [DynamicLayer() for _ in range(max(cache_layers, default=-1) + 1 - len(layers))]
    text_offsets = TextOffsets()
    for index, make_layer in cache_layers.items():
        if type(layers[index]) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"{type(model).__name__}: layer {index} caches more than keys and values ({type(layers[index]).__name__}), "
                f"which a per-head cache does not support."
            )
        layers[index] = make_layer(text_offsets)
    cache = PerHeadTransformersCache(layers, text_offsets)
    return PerHeadEncoderDecoderCache(cache, DynamicCache()) if _is_encoder_decoder(model) else cache


def make_dynamic_cache(model: Any) -> DynamicCache | EncoderDecoderCache:
    """Make the cache that transformers makes for a model."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    return EncoderDecoderCache(cache, DynamicCache()) if _is_encoder_decoder(model) else cache


def _is_encoder_decoder(model: Any) -> bool:
    """Return whether a cache also holds cross-attention, which sees all tokens of the source, without a window.

    T5Gemma has a configuration per stack, and only the common one says that it is an encoder-decoder.
    """
    return model.config.is_encoder_decoder or model.config.get_text_config(decoder=True).is_encoder_decoder
