"""The caches of a whole model, and which of the tokens in them are real."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, suggest_names
from headwise.heads import CrossAttentionCache, DynamicCache, LayerCache, PerHeadCache, SlidingWindowCache, StaticCache
from headwise.kernels.autotuned_linear import autotuned_decode_step
from headwise.spec import AttentionSpec, LayerAddress, ModelSpec


@runtime_checkable
class CachePlanProtocol(Protocol):
    """Something that says what the key heads of a model shall keep: a plan."""

    def spec_with_cache(self, model: Any) -> ModelSpec:
        """The model's spec, with caches by head; an error where it is for another model."""
        ...


class ModelCache:
    """One cache per attention layer. `dynamic` and `static` keep all that a layer can see, `sliding` the last `size` tokens.

    A layer with a window never needs more than its window, so it always keeps just that. Where the spec says what each key
    head keeps, its layers have a cache by head.
    """

    def __init__(self, spec: ModelSpec, kind: str = "dynamic", size: int | None = None) -> None:
        if kind not in ("dynamic", "static", "sliding"):
            raise HeadwiseError(f"there is no cache {kind!r}; {suggest_names(kind, ['dynamic', 'static', 'sliding'])}")
        if kind == "sliding" and size is None:
            raise HeadwiseError("a sliding cache needs size=…, how many tokens stay visible.")
        if kind == "dynamic" and size is not None:
            raise HeadwiseError("a dynamic cache takes no size; use kind='static' or 'sliding'.")
        if kind == "sliding" and spec.cache:
            raise HeadwiseError("this model's heads say themselves what they keep; use kind='dynamic' or 'static'.")
        self.layers: dict[LayerAddress, LayerCache] = {}
        for layer_address in spec.layer_addresses:
            if layer_address.stack != "enc":  # the source is read once, whole
                self.layers[layer_address] = _make_layer_cache(
                    spec.attention_at(layer_address), layer_address, kind, spec.context if size is None else size
                )
        self.length = 0
        self.attention_mask: Tensor | None = None  # (B, length): which tokens are not padding; None: all
        self.memory: Tensor | None = None  # (B, S, D): the encoded source
        self.source_attention_mask: Tensor | None = None  # (B, S): which of its tokens are not padding; None: all

    @contextmanager
    def atomic_step(self, model: nn.Module, rows: int) -> Iterator[None]:
        """A step of so many rows: its products are the quickest there are, and if it fails the cache is as it was."""
        saved = (self.length, self.attention_mask, self.memory, self.source_attention_mask)
        layer_states = {cache: cache.state for cache in self.layers.values()}
        try:
            with autotuned_decode_step(model, rows):
                yield
        except BaseException:
            self.length, self.attention_mask, self.memory, self.source_attention_mask = saved
            for cache, state in layer_states.items():
                cache.state = state
            raise

    def extend_attention_mask(self, ids: Tensor, attention_mask: Tensor | None) -> tuple[int, Tensor | None]:
        """Take note of new tokens, (B, T); returns how many came before, and which of all are real."""
        start, self.length = self.length, self.length + ids.shape[1]
        if attention_mask is not None or self.attention_mask is not None:
            old_mask = ids.new_ones(ids.shape[0], start) if self.attention_mask is None else self.attention_mask
            new_mask = torch.ones_like(ids) if attention_mask is None else attention_mask
            self.attention_mask = torch.cat((old_mask.bool(), new_mask.bool()), 1)
        return start, self.attention_mask

    def store_source(self, memory: Tensor | None, source_attention_mask: Tensor | None) -> Tensor | None:
        """Keep the encoded source and its padding from the first step; returns the padding to use."""
        if self.memory is None:
            self.memory, self.source_attention_mask = memory, source_attention_mask
        return self.source_attention_mask

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        for cache in self.layers.values():
            cache.reorder(rows)
        self.attention_mask = None if self.attention_mask is None else self.attention_mask.index_select(0, rows)
        self.memory = None if self.memory is None else self.memory.index_select(0, rows)
        self.source_attention_mask = (
            None if self.source_attention_mask is None else self.source_attention_mask.index_select(0, rows)
        )
        for cache in self.layers.values():
            if isinstance(cache, CrossAttentionCache) and cache.kv is not None:
                cache.source = self.memory  # its keys are of the same rows in the same order

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(cache.nbytes for cache in self.layers.values())


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
