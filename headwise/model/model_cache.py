"""The caches of a whole model, and which of the tokens in them are real."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError, close_names
from headwise.heads import Cache, FixedCache, GrowingCache, HeadCache, SlidingCache, SourceCache
from headwise.kernels.autotuned_linear import step
from headwise.spec import AttentionSpec, ModelSpec, SiteAddress


@runtime_checkable
class SaysCache(Protocol):
    """Something that says what the key heads of a model shall keep: a plan."""

    def cache_spec(self, model: Any) -> ModelSpec:
        """The model's spec, with caches by head; an error where it is for another model."""
        ...


class ModelCache:
    """One cache per attention layer. `growing` and `fixed` keep all that a layer can see, `sliding` the last `size` tokens.

    A layer with a window never needs more than its window, so it always keeps just that. Where the spec says what each key
    head keeps, its layers have a cache by head.
    """

    def __init__(self, spec: ModelSpec, kind: str = "growing", size: int | None = None) -> None:
        if kind not in ("growing", "fixed", "sliding"):
            raise HeadwiseError(f"there is no cache {kind!r}; {close_names(kind, ['growing', 'fixed', 'sliding'])}")
        if kind == "sliding" and size is None:
            raise HeadwiseError("a sliding cache needs size=…, how many tokens stay visible.")
        if kind == "growing" and size is not None:
            raise HeadwiseError("a growing cache takes no size; use kind='fixed' or 'sliding'.")
        if kind == "sliding" and spec.cache:
            raise HeadwiseError("this model's heads say themselves what they keep; use kind='growing' or 'fixed'.")
        self.layers: dict[SiteAddress, Cache] = {}
        for site in spec.sites:
            if site.stack != "enc":  # the source is read once, whole
                self.layers[site] = _make(spec.attention_at(site), site, kind, spec.context if size is None else size)
        self.length = 0
        self.real: Tensor | None = None  # (B, length): which tokens are not padding; None: all
        self.memory: Tensor | None = None  # (B, S, D): the encoded source
        self.memory_real: Tensor | None = None  # (B, S): which of its tokens are not padding; None: all

    @contextmanager
    def all_or_nothing(self, model: nn.Module, rows: int) -> Iterator[None]:
        """A step of so many rows: its products are the quickest there are, and if it fails the cache is as it was."""
        before = (self.length, self.real, self.memory, self.memory_real)
        layers = {cache: cache.state for cache in self.layers.values()}
        try:
            with step(model, rows):
                yield
        except BaseException:
            self.length, self.real, self.memory, self.memory_real = before
            for cache, state in layers.items():
                cache.state = state
            raise

    def note(self, ids: Tensor, padding: Tensor | None) -> tuple[int, Tensor | None]:
        """Take note of new tokens, (B, T); returns how many came before, and which of all are real."""
        start, self.length = self.length, self.length + ids.shape[1]
        if padding is not None or self.real is not None:
            before = ids.new_ones(ids.shape[0], start) if self.real is None else self.real
            now = torch.ones_like(ids) if padding is None else padding
            self.real = torch.cat((before.bool(), now.bool()), 1)
        return start, self.real

    def remember_source(self, memory: Tensor | None, real: Tensor | None) -> Tensor | None:
        """Keep the encoded source and its padding from the first step; returns the padding to use."""
        if self.memory is None:
            self.memory, self.memory_real = memory, real
        return self.memory_real

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        for cache in self.layers.values():
            cache.reorder(rows)
        self.real = None if self.real is None else self.real.index_select(0, rows)
        self.memory = None if self.memory is None else self.memory.index_select(0, rows)
        self.memory_real = None if self.memory_real is None else self.memory_real.index_select(0, rows)
        for cache in self.layers.values():
            if isinstance(cache, SourceCache) and cache.held is not None:
                cache.source = self.memory  # its keys are of the same rows in the same order

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(cache.bytes for cache in self.layers.values())


def _make(spec: AttentionSpec, site: SiteAddress, kind: str, size: int) -> Cache:
    window = spec.window
    if site.stack == "cross":
        return SourceCache()
    if spec.cache:
        return HeadCache(spec, spec.keeps, size if kind == "fixed" else None)
    if kind == "sliding":
        return SlidingCache(size if window is None else min(size, window))
    if window is not None:
        return SlidingCache(window)
    return FixedCache(size) if kind == "fixed" else GrowingCache()
