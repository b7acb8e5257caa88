"""Keys and values already computed, kept while generating. Three ways to keep them, one verb: `extend`.

Where heads of a layer keep different things, `headwise.heads.per_head_cache` has a cache.

Caches hold numbers, not graphs: no gradient flows through them.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from headwise.errors import HeadwiseError


class Cache(ABC):
    """The cache of one attention layer. `length` counts all tokens seen, kept or not."""

    length = 0

    @property
    @abstractmethod
    def state(self) -> tuple:
        """What a step changes: keep it to go back."""

    @state.setter
    @abstractmethod
    def state(self, kept: tuple) -> None: ...

    def visible(self, T: int) -> int:
        """How many keys a mask is about when T more tokens come."""
        return self.length + T

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory held."""


class WholeCache(Cache):
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
    def state(self, kept: tuple) -> None:
        self.length, self._k, self._v = kept

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self._k, self._v) if t is not None)

    def _room(self, k: Tensor, v: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Make room for so many tokens, keeping what is there."""
        self._check_batch(k)
        if self._k is None or self._v is None:
            self._k, self._v = (x.new_empty(*x.shape[:2], room, x.shape[3]) for x in (k.detach(), v.detach()))
        elif self._k.shape[2] < room:
            more = room - self._k.shape[2]
            self._k, self._v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (self._k, self._v))
        return self._k, self._v

    def _check_batch(self, k: Tensor) -> None:
        if self._k is not None and self._k.shape[0] != k.shape[0]:
            raise HeadwiseError(
                f"the cache holds a batch of {self._k.shape[0]}, got {k.shape[0]}; start a new cache for a new batch."
            )

    def _put(self, k: Tensor, v: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Write new tokens behind those already there."""
        kept_k, kept_v = self._room(k, v, room)
        start, self.length = self.length, self.length + k.shape[2]
        kept_k.narrow(2, start, k.shape[2]).copy_(k.detach() if k.requires_grad else k)
        kept_v.narrow(2, start, v.shape[2]).copy_(v.detach() if v.requires_grad else v)
        return kept_k.narrow(2, 0, self.length), kept_v.narrow(2, 0, self.length)


class GrowingCache(WholeCache):
    """Keeps everything. Room doubles when it runs out, so that a token costs the same however many came before."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        needed = self.length + k.shape[2]
        room = 0 if self._k is None else self._k.shape[2]
        return self._put(k, v, room if needed <= room else max(needed, 2 * room, 64))


class FixedCache(WholeCache):
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
                f"make it larger, or use a growing or sliding one."
            )
        return self._put(k, v, self.size)


class SlidingCache(WholeCache):
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
        keep = max(0, k.shape[2] - (self.size - 1))  # the next token sees itself and size − 1 more
        self._k, self._v = k[:, :, keep:].clone(), v[:, :, keep:].clone()
        return k, v

    def visible(self, T: int) -> int:
        return min(self.length, self.size - 1) + T


class SourceCache(WholeCache):
    """Cross-attention's: the keys and values of the source, computed once and used at every step."""

    source: Tensor | None = None  # whose keys they are

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.length = k.shape[2]
        self._k, self._v = k.detach(), v.detach()
        return self._k, self._v

    @property
    def held(self) -> tuple[Tensor, Tensor] | None:
        """The keys and values, if they are there already."""
        return None if self._k is None or self._v is None else (self._k, self._v)
