"""A mask is a type, not a tensor. True means: this query may look at this key.

Masks are built lazily, one block of rows and columns at a time, so a kernel that works in blocks never holds T×S of
anything. `&` and `|` combine them; an empty row is legal everywhere and yields zeros.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.kernels.symbolic_sizes import known, whole


class Mask(ABC):
    """Which key each query may look at. Make one with `causal`, `window`, `padding`, `document`, `per_head`, `allow`."""

    @abstractmethod
    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        """The part for these queries and keys: bool, broadcastable to (B, H, len(rows), len(cols))."""

    def dense(self, T: int, S: int, device: torch.device | str = "cpu") -> Tensor:
        """The whole mask at once: bool, broadcastable to (B, H, T, S), four axes."""
        return self.block(whole(T), whole(S), T, S, torch.device(device))

    def keys(self, rows: range, T: int, S: int) -> range:
        """A range outside which these queries see nothing, whatever the data. Kernels skip what lies beyond."""
        return range(S)

    def is_full(self, T: int, S: int) -> bool:
        """Whether it is known, without reading any tensor, that every query sees every key."""
        return False

    def may_be_empty(self, T: int, S: int) -> bool:
        """Whether some query might see no key at all, as far as is known without reading any tensor."""
        return True

    def planes(self) -> tuple[int, int]:
        """Over how many batch rows and heads the mask differs; (1, 1) where one plane serves all."""
        return 1, 1

    def for_heads(self, heads: "slice | list[int]") -> "Mask":
        """The mask of some of the heads."""
        return self

    def sees_itself(self, T: int, S: int) -> bool:
        """Whether it is known that every query sees its own place, the queries being the last T of S."""
        return False

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: B027 (most masks fit any call)
        """Refuse a mask that does not fit the call."""

    @staticmethod
    def of(allowed: Tensor) -> "Mask":
        """Any tensor as a mask, True = may look: (T, S), (B, T, S) or (B, H, T, S), axes of size 1 broadcast.

        >>> Mask.of(torch.eye(2, dtype=torch.bool)).dense(2, 2).shape
        torch.Size([1, 1, 2, 2])
        """
        allowed = _as_bool(allowed, "a mask")
        if allowed.ndim == 2:
            allowed = allowed[None, None]
        elif allowed.ndim == 3:
            allowed = allowed[:, None]
        elif allowed.ndim != 4:
            raise HeadwiseError(f"a mask is (T, S), (B, T, S) or (B, H, T, S); got shape {tuple(allowed.shape)}.")
        return Allow(allowed)

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, _as_mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Either(self, _as_mask(other))


@dataclass(frozen=True)
class Causal(Mask):
    """Key j is visible to query i when j ≤ i + offset. `offset` is how many keys come before the first query."""

    offset: int | None = None

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        ahead = _distance(rows, cols, self.places(T, S), device) < 0  # (R, C)
        return ~ahead[None, None]

    def places(self, T: int, S: int) -> int:
        """The place of the first query among the keys: bottom-right by default, which is right with a cache."""
        return S - T if self.offset is None else self.offset

    def keys(self, rows: range, T: int, S: int) -> range:
        return _within(range(rows.stop + self.places(T, S)), S)

    def is_full(self, T: int, S: int) -> bool:
        return known(self.places(T, S) >= S - 1)

    def sees_itself(self, T: int, S: int) -> bool:
        return self.places(T, S) == S - T >= 0

    def may_be_empty(self, T: int, S: int) -> bool:
        return self.places(T, S) < 0


@dataclass(frozen=True)
class Window(Mask):
    """Key j is visible to query i when −ahead ≤ i − j < size, places counted as in `Causal`."""

    size: int
    ahead: int
    offset: int | None = None

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        distance = _distance(rows, cols, self.places(T, S), device)  # (R, C)
        return ((distance < self.size) & (distance >= -self.ahead))[None, None]

    def places(self, T: int, S: int) -> int:
        """The place of the first query among the keys."""
        return S - T if self.offset is None else self.offset

    def keys(self, rows: range, T: int, S: int) -> range:
        shift = self.places(T, S)
        return _within(range(rows.start + shift - self.size + 1, rows.stop + shift + self.ahead), S)

    def is_full(self, T: int, S: int) -> bool:
        first, last = self.places(T, S), self.places(T, S) + T - 1
        return known(last < self.size) and known(S - 1 - first <= self.ahead)

    def sees_itself(self, T: int, S: int) -> bool:
        return self.places(T, S) == S - T >= 0

    def may_be_empty(self, T: int, S: int) -> bool:
        first, last = self.places(T, S), self.places(T, S) + T - 1
        return first + self.ahead < 0 or last - self.size >= S - 1


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Keys that are real tokens are visible, padding is not. `real` is (B, S), True at real tokens."""

    real: Tensor

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        return self.real[:, None, None, cols.start : cols.stop].to(device)  # (B, 1, 1, C)

    def planes(self) -> tuple[int, int]:
        return self.real.shape[0], 1

    def check(self, B: int, H: int, T: int, S: int) -> None:
        if self.real.shape[1] != S or self.real.shape[0] not in (1, B):
            raise HeadwiseError(
                f"the padding mask is {tuple(self.real.shape)} but there are {S} keys in a batch of {B}; "
                f"it must be (batch, keys), True at real tokens."
            )


@dataclass(frozen=True, eq=False)
class SameDocument(Mask):
    """Tokens see their own document only. `keys_of` is (B, S), `queries_of` (B, T); documents are numbered anyhow."""

    queries_of: Tensor
    keys_of: Tensor

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        queries = self.queries_of[:, None, rows.start : rows.stop, None].to(device)  # (B, 1, R, 1)
        return queries == self.keys_of[:, None, None, cols.start : cols.stop].to(device)  # (B, 1, R, C)

    def planes(self) -> tuple[int, int]:
        return max(self.keys_of.shape[0], self.queries_of.shape[0]), 1

    def check(self, B: int, H: int, T: int, S: int) -> None:
        for name, ids, length in (("queries", self.queries_of, T), ("keys", self.keys_of, S)):
            if ids.shape[1] != length or ids.shape[0] not in (1, B):
                raise HeadwiseError(
                    f"the document numbers of the {name} are {tuple(ids.shape)} but there are {length} {name} in a batch "
                    f"of {B}; give (batch, {name})."
                )


@dataclass(frozen=True, eq=False)
class HeadMasks(Mask):
    """Each head has a mask of its own."""

    masks: tuple[Mask, ...]

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        blocks = torch.broadcast_tensors(*[mask.block(rows, cols, T, S, device) for mask in self.masks])
        return torch.cat(blocks, dim=1)  # (B, H, R, C)

    def planes(self) -> tuple[int, int]:
        return max(mask.planes()[0] for mask in self.masks), len(self.masks)

    def for_heads(self, heads: slice | list[int]) -> Mask:
        return HeadMasks(self.masks[heads] if isinstance(heads, slice) else tuple(self.masks[head] for head in heads))

    def sees_itself(self, T: int, S: int) -> bool:
        return all(mask.sees_itself(T, S) for mask in self.masks)

    def keys(self, rows: range, T: int, S: int) -> range:
        ranges = [mask.keys(rows, T, S) for mask in self.masks]
        return range(min(r.start for r in ranges), max(r.stop for r in ranges))

    def is_full(self, T: int, S: int) -> bool:
        return all(mask.is_full(T, S) for mask in self.masks)

    def may_be_empty(self, T: int, S: int) -> bool:
        return any(mask.may_be_empty(T, S) for mask in self.masks)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        if len(self.masks) != H:
            raise HeadwiseError(
                f"the per-head mask has {len(self.masks)} masks but there are {H} heads; give one each."
            )
        for mask in self.masks:
            mask.check(B, 1, T, S)


@dataclass(frozen=True, eq=False)
class Allow(Mask):
    """An arbitrary tensor, True = may look, broadcastable to (B, H, T, S)."""

    allowed: Tensor

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        return cut_block(self.allowed, rows, cols).to(device)

    def planes(self) -> tuple[int, int]:
        return self.allowed.shape[0], self.allowed.shape[1]

    def for_heads(self, heads: slice | list[int]) -> Mask:
        return Allow(self.allowed[:, heads]) if self.allowed.shape[1] > 1 else self

    def check(self, B: int, H: int, T: int, S: int) -> None:
        fits = all(have in (1, want) for have, want in zip(self.allowed.shape, (B, H, T, S), strict=True))
        if not fits:
            raise HeadwiseError(
                f"the mask is {tuple(self.allowed.shape)} but the call is {(B, H, T, S)} (batch, heads, queries, keys); "
                f"each of its axes must be 1 or match."
            )


@dataclass(frozen=True)
class Both(Mask):
    """Visible under both masks."""

    one: Mask
    other: Mask

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        return self.one.block(rows, cols, T, S, device) & self.other.block(rows, cols, T, S, device)

    def planes(self) -> tuple[int, int]:
        (batch, heads), (batches, more) = self.one.planes(), self.other.planes()
        return max(batch, batches), max(heads, more)

    def for_heads(self, heads: slice | list[int]) -> Mask:
        return type(self)(self.one.for_heads(heads), self.other.for_heads(heads))

    def keys(self, rows: range, T: int, S: int) -> range:
        one, other = self.one.keys(rows, T, S), self.other.keys(rows, T, S)
        start = max(one.start, other.start)
        return range(start, max(start, min(one.stop, other.stop)))

    def is_full(self, T: int, S: int) -> bool:
        return self.one.is_full(T, S) and self.other.is_full(T, S)

    def may_be_empty(self, T: int, S: int) -> bool:
        return not self.sees_itself(T, S)

    def sees_itself(self, T: int, S: int) -> bool:
        return self.one.sees_itself(T, S) and self.other.sees_itself(T, S)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        self.one.check(B, H, T, S)
        self.other.check(B, H, T, S)


@dataclass(frozen=True)
class Either(Both):
    """Visible under either mask."""

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        return self.one.block(rows, cols, T, S, device) | self.other.block(rows, cols, T, S, device)

    def keys(self, rows: range, T: int, S: int) -> range:
        one, other = self.one.keys(rows, T, S), self.other.keys(rows, T, S)
        return range(min(one.start, other.start), max(one.stop, other.stop))

    def is_full(self, T: int, S: int) -> bool:
        return self.one.is_full(T, S) or self.other.is_full(T, S)

    def may_be_empty(self, T: int, S: int) -> bool:
        return self.one.may_be_empty(T, S) and self.other.may_be_empty(T, S)


# The makers: the words a caller uses.


@lru_cache
def causal(offset: int | None = None) -> Mask:
    """Look back, never ahead. `offset` is how many keys come before the first query; default S − T.

    >>> causal().dense(2, 3)[0, 0].int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return Causal(offset)


def window(size: int, ahead: int | None = None, offset: int | None = None) -> Mask:
    """Look fewer than `size` positions back and at most `ahead` forward (default: as far as back).

    >>> (causal() & window(2)).dense(3, 3)[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    if size < 1 or (ahead is not None and ahead < 0):
        raise HeadwiseError(f"a window has a size of at least 1 and looks ahead 0 or more, got {size} and {ahead}.")
    return Window(size, size - 1 if ahead is None else ahead, offset)


def padding_mask(real: Tensor) -> Mask:
    """Look at real tokens only. `real` is (B, S): True, or 1, at real tokens.

    >>> padding_mask(torch.tensor([[1, 1, 0]])).dense(1, 3)[0, 0].int()
    tensor([[1, 1, 0]], dtype=torch.int32)
    """
    real = torch.as_tensor(real)
    if real.ndim != 2:
        raise HeadwiseError(f"a padding mask is (batch, keys), True at real tokens; got shape {tuple(real.shape)}.")
    return Padding(_as_bool(real, "a padding mask"))


def document_mask(keys_of: Tensor, queries_of: Tensor | None = None) -> Mask:
    """Look inside one's own document only, when several are packed into one row. Numbers are (B, S).

    >>> document_mask(torch.tensor([[0, 0, 1]])).dense(3, 3)[0, 0].int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    keys_of = torch.as_tensor(keys_of)
    queries_of = keys_of if queries_of is None else torch.as_tensor(queries_of)
    for ids in (keys_of, queries_of):
        if ids.ndim != 2:
            raise HeadwiseError(f"document numbers are (batch, tokens); got shape {tuple(ids.shape)}.")
    return SameDocument(queries_of, keys_of)


def per_head(masks: Sequence[Mask]) -> Mask:
    """A mask of its own for each head, in the order of the heads present.

    >>> per_head([causal(), window(1)]).dense(2, 2)[0].int().tolist()
    [[[1, 0], [1, 1]], [[1, 0], [0, 1]]]
    """
    if not masks:
        raise HeadwiseError("a per-head mask needs at least one mask.")
    return HeadMasks(tuple(_as_mask(mask) for mask in masks))


def cut_block(full: Tensor, rows: range, cols: range) -> Tensor:
    """A block of a (B, H, T, S) tensor whose axes of size 1 broadcast."""
    if full.shape[-2] > 1:
        full = full[..., rows.start : rows.stop, :]
    return full[..., cols.start : cols.stop] if full.shape[-1] > 1 else full


def _distance(rows: range, cols: range, shift: int, device: torch.device) -> Tensor:
    """How far each key lies behind each query: positive in the past. (R, C)"""
    queries = torch.arange(rows.start + shift, rows.stop + shift, device=device)
    return queries[:, None] - torch.arange(cols.start, cols.stop, device=device)


def _within(keys: range, S: int) -> range:
    start = min(max(0, keys.start), S)
    return range(start, min(max(start, keys.stop), S))


def _as_bool(tensor: Tensor, what: str) -> Tensor:
    if tensor.is_floating_point():
        raise HeadwiseError(
            f"{what} holds True where a query may look, got {tensor.dtype}; pass additive scores as bias=, and convert "
            f"torch's masks with headwise.kernels.torch_masks."
        )
    return tensor.bool()


def _as_mask(mask: object) -> Mask:
    if isinstance(mask, Mask):
        return mask
    raise HeadwiseError(f"expected a mask, got {type(mask).__name__}; wrap a tensor with hw.Mask.of(tensor).")
