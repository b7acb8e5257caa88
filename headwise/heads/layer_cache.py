"""Keys and values already computed, kept while generating. Three ways to keep them, one verb: `extend`.

Where heads of a layer keep different things, `headwise.heads.per_head_cache` has a cache.

Caches hold numbers, not graphs: no gradient flows through them.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from headwise.errors import HeadwiseError


class LayerCache(ABC):
    """The cache of one attention layer. `length` counts all tokens seen, kept or not."""

    length = 0

    @property
    @abstractmethod
    def state(self) -> tuple:
        """What a step changes: keep it to go back."""

    @state.setter
    @abstractmethod
    def state(self, snapshot: tuple) -> None: ...

    def visible_keys(self, T: int) -> int:
        """How many keys a mask is about when T more tokens come."""
        return self.length + T

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Memory held."""


class SharedKVCache(LayerCache):
    """All key heads of the layer keep the same tokens, in one tensor."""

    def __init__(self) -> None:
        self._k: Tensor | None = None  # (B, K, room, d)
        self._v: Tensor | None = None  # (B, K, room, e)

    @abstractmethod
    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, (B, K, T, ·), and return all that are visible, (B, K, S, ·)."""

    def reorder(self, rows: Tensor) -> None:
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k.index_select(0, rows), self._v.index_select(0, rows)

    @property
    def state(self) -> tuple:
        return self.length, self._k, self._v

    @state.setter
    def state(self, snapshot: tuple) -> None:
        self.length, self._k, self._v = snapshot

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._k, self._v) if t is not None)

    def _reserve(self, k: Tensor, v: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Make room for so many tokens, keeping what is there."""
        self._check_batch(k)
        if self._k is None or self._v is None:
            self._k, self._v = (x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (k.detach(), v.detach()))
        elif self._k.shape[2] < capacity:
            missing = capacity - self._k.shape[2]
            self._k, self._v = (torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (self._k, self._v))
        return self._k, self._v

    def _check_batch(self, k: Tensor) -> None:
        if self._k is not None and self._k.shape[0] != k.shape[0]:
            raise HeadwiseError(
                f"the cache holds a batch of {self._k.shape[0]}, got {k.shape[0]}; start a new cache for a new batch."
            )

    def _append(self, k: Tensor, v: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Write new tokens behind those already there."""
        stored_k, stored_v = self._reserve(k, v, capacity)
        start, self.length = self.length, self.length + k.shape[2]
        stored_k.narrow(2, start, k.shape[2]).copy_(k.detach() if k.requires_grad else k)
        stored_v.narrow(2, start, v.shape[2]).copy_(v.detach() if v.requires_grad else v)
        return stored_k.narrow(2, 0, self.length), stored_v.narrow(2, 0, self.length)


class DynamicCache(SharedKVCache):
    """Keeps everything. Room doubles when it runs out, so that a token costs the same however many came before."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        needed = self.length + k.shape[2]
        capacity = 0 if self._k is None else self._k.shape[2]
        return self._append(k, v, capacity if needed <= capacity else max(needed, 2 * capacity, 64))


class StaticCache(SharedKVCache):
    """Keeps up to `size` tokens in memory taken once; one more is an error."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 1:
            raise HeadwiseError(f"a cache holds at least 1 token, got size {size}.")
        self.size = size

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.length + k.shape[2] > self.size:
            raise HeadwiseError(
                f"the cache is full: it holds {self.size} tokens, {self.length} are there and {k.shape[2]} more came; "
                f"make it larger, or use a dynamic or sliding one."
            )
        return self._append(k, v, self.size)


class SlidingWindowCache(SharedKVCache):
    """Keeps what a window of `size` can still see: for each new token, the `size` − 1 before it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 1:
            raise HeadwiseError(f"a sliding cache keeps at least 1 token, got size {size}.")
        self.size = size

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._check_batch(k)
        k, v = k.detach(), v.detach()
        self.length += k.shape[2]
        if self._k is not None and self._v is not None:
            k, v = torch.cat((self._k, k), 2), torch.cat((self._v, v), 2)
        start = max(0, k.shape[2] - (self.size - 1))  # the next token sees itself and size − 1 more
        self._k, self._v = k[:, :, start:].clone(), v[:, :, start:].clone()
        return k, v

    def visible_keys(self, T: int) -> int:
        return min(self.length, self.size - 1) + T


class CrossAttentionCache(SharedKVCache):
    """Cross-attention's: the keys and values of the source, computed once and used at every step."""

    source: Tensor | None = None  # whose keys they are

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.length = k.shape[2]
        self._k, self._v = k.detach(), v.detach()
        return self._k, self._v

    @property
    def kv(self) -> tuple[Tensor, Tensor] | None:
        """The keys and values, if they are there already."""
        return None if self._k is None or self._v is None else (self._k, self._v)
