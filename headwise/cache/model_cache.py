"""The caches of all layers of a model, and the attention mask of all tokens seen."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headwise.cache.layer_cache import (
    CrossAttentionCache,
    DynamicCache,
    LayerCache,
    SlidingWindowCache,
    StaticCache,
)
from headwise.cache.per_head_cache import PerHeadCache
from headwise.errors import ArgumentError, suggest_names
from headwise.spec import AttentionSpec, LayerAddress, ModelSpec


class ModelCache:
    """One KV cache per attention layer, created by `model.cache()`.

    A layer with a window caches only its window. A layer whose spec has cache policies has a `PerHeadCache`.

    Args:
        spec: Configuration of the model.
        kind: "dynamic" grows as needed, "static" allocates memory for `size` tokens, "sliding" caches the last `size` tokens.
        size: Number of tokens of a static or sliding cache. The default of a static cache is the context of the model.

    Attributes:
        layers: Cache of each layer by its address.
        length: Number of tokens seen.
        attention_mask: (B, length), True at real tokens. None if all tokens are real.
        memory: Encoded source of an encoder-decoder, (B, S, D).
        source_attention_mask: (B, S), True at real tokens of the source. None if all tokens are real.
    """

    def __init__(self, spec: ModelSpec, kind: str = "dynamic", size: int | None = None) -> None:
        if kind not in ("dynamic", "static", "sliding"):
            raise ArgumentError(f"kind={kind!r}: unknown; {suggest_names(kind, ['dynamic', 'static', 'sliding'])}")
        if kind == "sliding" and size is None:
            raise ArgumentError("size: a sliding cache needs the number of tokens that stay visible. Set size=….")
        if kind == "dynamic" and size is not None:
            raise ArgumentError(
                f"size={size}: a dynamic cache does not have a size. Omit it, or use kind='static' or 'sliding'."
            )
        if kind == "sliding" and spec.cache:
            raise ArgumentError(
                "kind='sliding': not supported, because the model has cache policies per KV head. "
                "Use kind='dynamic' or 'static'."
            )
        self.layers: dict[LayerAddress, LayerCache] = {}
        for layer_address in spec.layer_addresses:
            if layer_address.stack != "enc":  # the encoder runs once
                self.layers[layer_address] = _make_layer_cache(
                    spec.attention_at(layer_address), layer_address, kind, spec.context if size is None else size
                )
        self.length = 0
        self.attention_mask: Tensor | None = None
        self.memory: Tensor | None = None
        self.source_attention_mask: Tensor | None = None

    @contextmanager
    def atomic_step(self) -> Iterator[None]:
        """Restore the cache if the step inside fails."""
        saved = (self.length, self.attention_mask, self.memory, self.source_attention_mask)
        states = [cache.snapshot() for cache in self.layers.values()]
        try:
            yield
        except BaseException:
            self.length, self.attention_mask, self.memory, self.source_attention_mask = saved
            for cache, state in zip(self.layers.values(), states, strict=True):
                cache.restore(state)
            raise

    def advance_length_and_mask(self, ids: Tensor, attention_mask: Tensor | None) -> tuple[int, Tensor | None]:
        """Count new tokens, (B, T). Return the number of earlier tokens and the attention mask of all tokens."""
        start, self.length = self.length, self.length + ids.shape[1]
        if attention_mask is not None or self.attention_mask is not None:
            old_mask = ids.new_ones(ids.shape[0], start) if self.attention_mask is None else self.attention_mask
            new_mask = torch.ones_like(ids) if attention_mask is None else attention_mask
            self.attention_mask = torch.cat((old_mask.bool(), new_mask.bool()), 1)
        return start, self.attention_mask

    def store_source(self, memory: Tensor | None, source_attention_mask: Tensor | None) -> Tensor | None:
        """Store the encoded source and its attention mask in the first step. Return the mask to use."""
        if self.memory is None:
            self.memory, self.source_attention_mask = memory, source_attention_mask
        return self.source_attention_mask

    def reorder(self, rows: Tensor) -> None:
        """Select and reorder batch rows."""
        for cache in self.layers.values():
            cache.reorder(rows)
        self.attention_mask = None if self.attention_mask is None else self.attention_mask.index_select(0, rows)
        self.memory = None if self.memory is None else self.memory.index_select(0, rows)
        self.source_attention_mask = (
            None if self.source_attention_mask is None else self.source_attention_mask.index_select(0, rows)
        )
        for cache in self.layers.values():
            if isinstance(cache, CrossAttentionCache) and cache.kv is not None:
                cache.source = self.memory  # its keys have the same rows in the same order

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(cache.nbytes for cache in self.layers.values())


def check_model_cache(cache: ModelCache | None) -> None:
    """Raise if a cache does not come from `model.cache()`."""
    if cache is not None and not isinstance(cache, ModelCache):
        raise ArgumentError(f"cache={cache!r}: must be created by model.cache().")


def _make_layer_cache(spec: AttentionSpec, layer_address: LayerAddress, kind: str, size: int) -> LayerCache:
    window = spec.window
    if layer_address.stack == "cross":
        return CrossAttentionCache()
    if spec.cache:
        return PerHeadCache(spec, spec.cache_policies, size if kind == "static" else None)
    if kind == "sliding":
        return SlidingWindowCache(size if window is None else min(size, window))
    if window is not None:
        return SlidingWindowCache(window)
    return StaticCache(size) if kind == "static" else DynamicCache()
