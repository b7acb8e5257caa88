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
from headwise.kernels.symbolic_sizes import full_range, statically_true


class Mask(ABC):
    """Which key each query may look at.

    Make one with `causal`, `window`, `padding_mask`, `document_mask`, `per_head`, `Mask.of`.
    """

    @abstractmethod
    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        """The part for these queries and keys: bool, broadcastable to (B, H, len(rows), len(cols))."""

    def dense(self, T: int, S: int, device: torch.device | str = "cpu") -> Tensor:
        """The whole mask at once: bool, broadcastable to (B, H, T, S), four axes."""
        return self.block(full_range(T), full_range(S), T, S, torch.device(device))

    def key_range(self, rows: range, T: int, S: int) -> range:
        """A range outside which these queries see nothing, whatever the data. Kernels skip what lies beyond."""
        return range(S)

    def is_full(self, T: int, S: int) -> bool:
        """Whether it is known, without reading any tensor, that every query sees every key."""
        return False

    def may_have_empty_rows(self, T: int, S: int) -> bool:
        """Whether some query might see no key at all, as far as is known without reading any tensor."""
        return True

    def leading_shape(self) -> tuple[int, int]:
        """Over how many batch rows and heads the mask differs; (1, 1) where one plane serves all."""
        return 1, 1

    def for_heads(self, heads: "slice | list[int]") -> "Mask":
        """The mask of some of the heads."""
        return self

    def allows_self(self, T: int, S: int) -> bool:
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
        return DenseMask(allowed)

    def __and__(self, other: "Mask") -> "Mask":
        return AndMask(self, _as_mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return OrMask(self, _as_mask(other))


@dataclass(frozen=True)
class CausalMask(Mask):
    """Key j is visible to query i when j ≤ i + offset. `offset` is how many keys come before the first query."""

    offset: int | None = None

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        ahead = _distance(rows, cols, self.resolve_offset(T, S), device) < 0  # (R, C)
        return ~ahead[None, None]

    def resolve_offset(self, T: int, S: int) -> int:
        """The place of the first query among the keys: bottom-right by default, which is right with a cache."""
        return S - T if self.offset is None else self.offset

    def key_range(self, rows: range, T: int, S: int) -> range:
        return _clip_range(range(rows.stop + self.resolve_offset(T, S)), S)

    def is_full(self, T: int, S: int) -> bool:
        return statically_true(self.resolve_offset(T, S) >= S - 1)

    def allows_self(self, T: int, S: int) -> bool:
        return self.resolve_offset(T, S) == S - T >= 0

    def may_have_empty_rows(self, T: int, S: int) -> bool:
        return self.resolve_offset(T, S) < 0


@dataclass(frozen=True)
class WindowMask(Mask):
    """Key j is visible to query i when −lookahead ≤ i − j < size, places counted as in `CausalMask`."""

    size: int
    lookahead: int
    offset: int | None = None

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        distance = _distance(rows, cols, self.resolve_offset(T, S), device)  # (R, C)
        return ((distance < self.size) & (distance >= -self.lookahead))[None, None]

    def resolve_offset(self, T: int, S: int) -> int:
        """The place of the first query among the keys."""
        return S - T if self.offset is None else self.offset

    def key_range(self, rows: range, T: int, S: int) -> range:
        shift = self.resolve_offset(T, S)
        return _clip_range(range(rows.start + shift - self.size + 1, rows.stop + shift + self.lookahead), S)

    def is_full(self, T: int, S: int) -> bool:
        first, last = self.resolve_offset(T, S), self.resolve_offset(T, S) + T - 1
        return statically_true(last < self.size) and statically_true(S - 1 - first <= self.lookahead)

    def allows_self(self, T: int, S: int) -> bool:
        return self.resolve_offset(T, S) == S - T >= 0

    def may_have_empty_rows(self, T: int, S: int) -> bool:
        first, last = self.resolve_offset(T, S), self.resolve_offset(T, S) + T - 1
        return first + self.lookahead < 0 or last - self.size >= S - 1


@dataclass(frozen=True, eq=False)
class PaddingMask(Mask):
    """Keys that are real tokens are visible, padding is not. `attention_mask` is (B, S), True at real tokens."""

    attention_mask: Tensor

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        return self.attention_mask[:, None, None, cols.start : cols.stop].to(device)  # (B, 1, 1, C)

    def leading_shape(self) -> tuple[int, int]:
        return self.attention_mask.shape[0], 1

    def check(self, B: int, H: int, T: int, S: int) -> None:
        if self.attention_mask.shape[1] != S or self.attention_mask.shape[0] not in (1, B):
            raise HeadwiseError(
                f"the padding mask is {tuple(self.attention_mask.shape)} but there are {S} keys in a batch of {B}; "
                f"it must be (batch, keys), True at real tokens."
            )


@dataclass(frozen=True, eq=False)
class DocumentMask(Mask):
    """Tokens see their own document only. `key_documents` (B, S), `query_documents` (B, T); documents are numbered anyhow."""

    query_documents: Tensor
    key_documents: Tensor

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        queries = self.query_documents[:, None, rows.start : rows.stop, None].to(device)  # (B, 1, R, 1)
        return queries == self.key_documents[:, None, None, cols.start : cols.stop].to(device)  # (B, 1, R, C)

    def leading_shape(self) -> tuple[int, int]:
        return max(self.key_documents.shape[0], self.query_documents.shape[0]), 1

    def check(self, B: int, H: int, T: int, S: int) -> None:
        for name, ids, length in (("queries", self.query_documents, T), ("keys", self.key_documents, S)):
            if ids.shape[1] != length or ids.shape[0] not in (1, B):
                raise HeadwiseError(
                    f"the document numbers of the {name} are {tuple(ids.shape)} but there are {length} {name} in a batch "
                    f"of {B}; give (batch, {name})."
                )


@dataclass(frozen=True, eq=False)
class PerHeadMask(Mask):
    """Each head has a mask of its own."""

    masks: tuple[Mask, ...]

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        blocks = torch.broadcast_tensors(*[mask.block(rows, cols, T, S, device) for mask in self.masks])
        return torch.cat(blocks, dim=1)  # (B, H, R, C)

    def leading_shape(self) -> tuple[int, int]:
        return max(mask.leading_shape()[0] for mask in self.masks), len(self.masks)

    def for_heads(self, heads: slice | list[int]) -> Mask:
        return PerHeadMask(self.masks[heads] if isinstance(heads, slice) else tuple(self.masks[head] for head in heads))

    def allows_self(self, T: int, S: int) -> bool:
        return all(mask.allows_self(T, S) for mask in self.masks)

    def key_range(self, rows: range, T: int, S: int) -> range:
        ranges = [mask.key_range(rows, T, S) for mask in self.masks]
        return range(min(r.start for r in ranges), max(r.stop for r in ranges))

    def is_full(self, T: int, S: int) -> bool:
        return all(mask.is_full(T, S) for mask in self.masks)

    def may_have_empty_rows(self, T: int, S: int) -> bool:
        return any(mask.may_have_empty_rows(T, S) for mask in self.masks)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        if len(self.masks) != H:
            raise HeadwiseError(
                f"the per-head mask has {len(self.masks)} masks but there are {H} heads; give one each."
            )
        for mask in self.masks:
            mask.check(B, 1, T, S)


@dataclass(frozen=True, eq=False)
class DenseMask(Mask):
    """An arbitrary tensor, True = may look, broadcastable to (B, H, T, S)."""

    allowed: Tensor

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        return slice_block(self.allowed, rows, cols).to(device)

    def leading_shape(self) -> tuple[int, int]:
        return self.allowed.shape[0], self.allowed.shape[1]

    def for_heads(self, heads: slice | list[int]) -> Mask:
        return DenseMask(self.allowed[:, heads]) if self.allowed.shape[1] > 1 else self

    def check(self, B: int, H: int, T: int, S: int) -> None:
        fits = all(size in (1, expected) for size, expected in zip(self.allowed.shape, (B, H, T, S), strict=True))
        if not fits:
            raise HeadwiseError(
                f"the mask is {tuple(self.allowed.shape)} but the call is {(B, H, T, S)} (batch, heads, queries, keys); "
                f"each of its axes must be 1 or match."
            )


@dataclass(frozen=True)
class AndMask(Mask):
    """Visible under both masks."""

    left: Mask
    right: Mask

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        return self.left.block(rows, cols, T, S, device) & self.right.block(rows, cols, T, S, device)

    def leading_shape(self) -> tuple[int, int]:
        (batch, heads), (other_batch, other_heads) = self.left.leading_shape(), self.right.leading_shape()
        return max(batch, other_batch), max(heads, other_heads)

    def for_heads(self, heads: slice | list[int]) -> Mask:
        return type(self)(self.left.for_heads(heads), self.right.for_heads(heads))

    def key_range(self, rows: range, T: int, S: int) -> range:
        left, right = self.left.key_range(rows, T, S), self.right.key_range(rows, T, S)
        start = max(left.start, right.start)
        return range(start, max(start, min(left.stop, right.stop)))

    def is_full(self, T: int, S: int) -> bool:
        return self.left.is_full(T, S) and self.right.is_full(T, S)

    def may_have_empty_rows(self, T: int, S: int) -> bool:
        return not self.allows_self(T, S)

    def allows_self(self, T: int, S: int) -> bool:
        return self.left.allows_self(T, S) and self.right.allows_self(T, S)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        self.left.check(B, H, T, S)
        self.right.check(B, H, T, S)


@dataclass(frozen=True)
class OrMask(AndMask):
    """Visible under either mask."""

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        return self.left.block(rows, cols, T, S, device) | self.right.block(rows, cols, T, S, device)

    def key_range(self, rows: range, T: int, S: int) -> range:
        left, right = self.left.key_range(rows, T, S), self.right.key_range(rows, T, S)
        return range(min(left.start, right.start), max(left.stop, right.stop))

    def is_full(self, T: int, S: int) -> bool:
        return self.left.is_full(T, S) or self.right.is_full(T, S)

    def may_have_empty_rows(self, T: int, S: int) -> bool:
        return self.left.may_have_empty_rows(T, S) and self.right.may_have_empty_rows(T, S)


# The makers: the words a caller uses.


@lru_cache
def causal(offset: int | None = None) -> Mask:
    """Look back, never ahead. `offset` is how many keys come before the first query; default S − T.

    >>> causal().dense(2, 3)[0, 0].int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return CausalMask(offset)


def window(size: int, lookahead: int | None = None, offset: int | None = None) -> Mask:
    """Look fewer than `size` positions back and at most `ahead` forward (default: as far as back).

    >>> (causal() & window(2)).dense(3, 3)[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    if size < 1 or (lookahead is not None and lookahead < 0):
        raise HeadwiseError(f"a window has a size of at least 1 and looks ahead 0 or more, got {size} and {lookahead}.")
    return WindowMask(size, size - 1 if lookahead is None else lookahead, offset)


def padding_mask(attention_mask: Tensor) -> Mask:
    """Look at real tokens only. `attention_mask` is (B, S): True, or 1, at real tokens.

    >>> padding_mask(torch.tensor([[1, 1, 0]])).dense(1, 3)[0, 0].int()
    tensor([[1, 1, 0]], dtype=torch.int32)
    """
    attention_mask = torch.as_tensor(attention_mask)
    if attention_mask.ndim != 2:
        raise HeadwiseError(
            f"a padding mask is (batch, keys), True at real tokens; got shape {tuple(attention_mask.shape)}."
        )
    return PaddingMask(_as_bool(attention_mask, "a padding mask"))


def document_mask(key_documents: Tensor, query_documents: Tensor | None = None) -> Mask:
    """Look inside one's own document only, when several are packed into one row. Numbers are (B, S).

    >>> document_mask(torch.tensor([[0, 0, 1]])).dense(3, 3)[0, 0].int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    key_documents = torch.as_tensor(key_documents)
    query_documents = key_documents if query_documents is None else torch.as_tensor(query_documents)
    for ids in (key_documents, query_documents):
        if ids.ndim != 2:
            raise HeadwiseError(f"document numbers are (batch, tokens); got shape {tuple(ids.shape)}.")
    return DocumentMask(query_documents, key_documents)


def per_head(masks: Sequence[Mask]) -> Mask:
    """A mask of its own for each head, in the order of the heads present.

    >>> per_head([causal(), window(1)]).dense(2, 2)[0].int().tolist()
    [[[1, 0], [1, 1]], [[1, 0], [0, 1]]]
    """
    if not masks:
        raise HeadwiseError("a per-head mask needs at least one mask.")
    return PerHeadMask(tuple(_as_mask(mask) for mask in masks))


def and_masks(mask: Mask | None, other: Mask) -> Mask:
    """Combine a mask with one that may be None."""
    if mask is None:
        return other
    if not isinstance(mask, Mask):
        raise HeadwiseError(f"mask must be a Mask, got {type(mask).__name__}; wrap a tensor with hw.Mask.of(tensor).")
    return mask & other


def slice_block(full: Tensor, rows: range, cols: range) -> Tensor:
    """A block of a (B, H, T, S) tensor whose axes of size 1 broadcast."""
    if full.shape[-2] > 1:
        full = full[..., rows.start : rows.stop, :]
    return full[..., cols.start : cols.stop] if full.shape[-1] > 1 else full


def _distance(rows: range, cols: range, shift: int, device: torch.device) -> Tensor:
    """How far each key lies behind each query: positive in the past. (R, C)"""
    queries = torch.arange(rows.start + shift, rows.stop + shift, device=device)
    return queries[:, None] - torch.arange(cols.start, cols.stop, device=device)


def _clip_range(keys: range, S: int) -> range:
    start = min(max(0, keys.start), S)
    return range(start, min(max(start, keys.stop), S))


def _as_bool(tensor: Tensor, name: str) -> Tensor:
    if tensor.is_floating_point():
        raise HeadwiseError(
            f"{name} holds True where a query may look, got {tensor.dtype}; pass additive scores as bias=, and convert "
            f"torch's masks with headwise.kernels.torch_masks."
        )
    return tensor.bool()


def _as_mask(mask: object) -> Mask:
    if isinstance(mask, Mask):
        return mask
    raise HeadwiseError(f"expected a mask, got {type(mask).__name__}; wrap a tensor with hw.Mask.of(tensor).")
