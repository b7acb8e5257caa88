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

from headwise.errors import ArgumentError
from headwise.kernels.symbolic_sizes import full_range, statically_true


class Mask(ABC):
    """Keys that each query may attend to. `&` and `|` combine masks.

    Create masks with `causal`, `window`, `padding_mask`, `document_mask`, `per_head` or `Mask.of`.

    >>> (causal() & padding_mask(torch.tensor([[1, 1, 0]]))).dense(3, 3)[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 0]], dtype=torch.int32)
    """

    @abstractmethod
    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        """Return the mask of some queries and keys: bool, broadcastable to (B, H, len(rows), len(cols)).

        Args:
            rows: Range of the queries.
            cols: Range of the keys.
            T: Number of all queries.
            S: Number of all keys.
            device: Device of the result.
        """

    def dense(self, T: int, S: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the full mask: bool with four axes, broadcastable to (B, H, T, S).

        Args:
            T: Number of queries.
            S: Number of keys.
            device: Device of the result.
        """
        return self.block(full_range(T), full_range(S), T, S, torch.device(device))

    def key_range(self, rows: range, T: int, S: int) -> range:
        """Return a range that contains all keys visible to these queries. Kernels skip the other keys.

        Args:
            rows: Range of the queries.
            T: Number of all queries.
            S: Number of all keys.
        """
        return range(S)

    def is_full(self, T: int, S: int) -> bool:
        """Return True if every query certainly attends to every key. Tensors are not read."""
        return False

    def may_have_empty_rows(self, T: int, S: int) -> bool:
        """Return False if every query certainly has a visible key. Tensors are not read."""
        return True

    def leading_shape(self) -> tuple[int, int]:
        """Return the batch and head sizes of the mask: (1, 1) if all examples and heads share one mask."""
        return 1, 1

    def for_heads(self, heads: "slice | list[int]") -> "Mask":
        """Return the mask of some heads.

        Args:
            heads: Indices of the heads.
        """
        return self

    def allows_self(self, T: int, S: int) -> bool:
        """Return True if every query certainly attends to its own position. The queries are the last T of S tokens."""
        return False

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: B027 (most masks fit any call)
        """Raise if the mask does not fit a call with these sizes."""

    @staticmethod
    def of(allowed: Tensor) -> "Mask":
        """Convert a bool or integer tensor to a mask.

        Args:
            allowed: True at visible keys: (T, S), (B, T, S) or (B, H, T, S). Axes of size 1 broadcast.

        >>> Mask.of(torch.eye(2, dtype=torch.bool)).dense(2, 2).shape
        torch.Size([1, 1, 2, 2])
        """
        allowed = _as_bool(allowed, "mask")
        if allowed.ndim == 2:
            allowed = allowed[None, None]
        elif allowed.ndim == 3:
            allowed = allowed[:, None]
        elif allowed.ndim != 4:
            raise ArgumentError(
                f"mask: must have shape (T, S), (B, T, S) or (B, H, T, S). Got shape {tuple(allowed.shape)}."
            )
        return DenseMask(allowed)

    def __and__(self, other: "Mask") -> "Mask":
        return AndMask(self, _require_mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return OrMask(self, _require_mask(other))


@dataclass(frozen=True)
class CausalMask(Mask):
    """Key j is visible to query i if j ≤ i + offset. `offset` is the number of keys before the first query."""

    offset: int | None = None

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        ahead = _distance(rows, cols, self.resolve_offset(T, S), device) < 0  # (R, C)
        return ~ahead[None, None]

    def resolve_offset(self, T: int, S: int) -> int:
        """Return the key index of the first query. The default S − T is correct with a cache."""
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
    """Key j is visible to query i if −lookahead ≤ i + offset − j < size."""

    size: int
    lookahead: int
    offset: int | None = None

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        distance = _distance(rows, cols, self.resolve_offset(T, S), device)  # (R, C)
        return ((distance < self.size) & (distance >= -self.lookahead))[None, None]

    def resolve_offset(self, T: int, S: int) -> int:
        """Return the key index of the first query."""
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
            raise ArgumentError(
                f"attention_mask: must have shape (batch, keys) = ({B}, {S}), True at real tokens. "
                f"Got shape {tuple(self.attention_mask.shape)}."
            )


@dataclass(frozen=True, eq=False)
class DocumentMask(Mask):
    """Tokens attend to tokens of the same document only. `query_documents` (B, T) and `key_documents` (B, S) are any ids."""

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
                raise ArgumentError(
                    f"document ids of the {name}: must have shape (batch, {name}) = ({B}, {length}). "
                    f"Got shape {tuple(ids.shape)}."
                )


@dataclass(frozen=True, eq=False)
class PerHeadMask(Mask):
    """One mask per head."""

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
            raise ArgumentError(f"per_head mask: needs one mask per head. Got {len(self.masks)} masks for {H} heads.")
        for mask in self.masks:
            mask.check(B, 1, T, S)


@dataclass(frozen=True, eq=False)
class DenseMask(Mask):
    """A bool tensor, True at visible keys, broadcastable to (B, H, T, S)."""

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
            raise ArgumentError(
                f"mask: must broadcast to (batch, heads, queries, keys) = {(B, H, T, S)}. "
                f"Got shape {tuple(self.allowed.shape)}."
            )


@dataclass(frozen=True)
class AndMask(Mask):
    """Keys that are visible under both masks."""

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
    """Keys that are visible under at least one of two masks."""

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        return self.left.block(rows, cols, T, S, device) | self.right.block(rows, cols, T, S, device)

    def key_range(self, rows: range, T: int, S: int) -> range:
        left, right = self.left.key_range(rows, T, S), self.right.key_range(rows, T, S)
        return range(min(left.start, right.start), max(left.stop, right.stop))

    def is_full(self, T: int, S: int) -> bool:
        return self.left.is_full(T, S) or self.right.is_full(T, S)

    def may_have_empty_rows(self, T: int, S: int) -> bool:
        return self.left.may_have_empty_rows(T, S) and self.right.may_have_empty_rows(T, S)


# Public functions that create masks.


@lru_cache
def causal(offset: int | None = None) -> Mask:
    """Create a causal mask: a query attends to itself and to earlier tokens.

    Args:
        offset: Number of keys before the first query. None means S − T, which is correct with a cache.

    >>> causal().dense(2, 3)[0, 0].int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return CausalMask(offset)


def window(size: int, lookahead: int | None = None, offset: int | None = None) -> Mask:
    """Create a sliding-window mask.

    Args:
        size: A query attends to keys fewer than `size` positions back, including itself.
        lookahead: Number of later positions that a query attends to. None means `size - 1`.
        offset: Number of keys before the first query. None means S − T, which is correct with a cache.

    Returns:
        A mask that is combined with others by `&`.

    >>> (causal() & window(2)).dense(3, 3)[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    if size < 1 or (lookahead is not None and lookahead < 0):
        raise ArgumentError(
            f"window size={size}, lookahead={lookahead}: size must be at least 1 and lookahead at least 0 (or None)."
        )
    return WindowMask(size, size - 1 if lookahead is None else lookahead, offset)


def padding_mask(attention_mask: Tensor) -> Mask:
    """Create a mask that hides padding.

    Args:
        attention_mask: (B, S), True or 1 at real tokens, as in transformers.

    Returns:
        A mask that is combined with others by `&`.

    >>> padding_mask(torch.tensor([[1, 1, 0]])).dense(1, 3)[0, 0].int()
    tensor([[1, 1, 0]], dtype=torch.int32)
    """
    attention_mask = torch.as_tensor(attention_mask)
    if attention_mask.ndim != 2:
        raise ArgumentError(
            f"attention_mask: must have shape (batch, keys), True at real tokens. Got shape {tuple(attention_mask.shape)}."
        )
    return PaddingMask(_as_bool(attention_mask, "attention_mask"))


def document_mask(key_documents: Tensor, query_documents: Tensor | None = None) -> Mask:
    """Create a mask for rows that contain several documents: tokens attend to tokens of the same document only.

    Args:
        key_documents: Document id of each key, (B, S).
        query_documents: Document id of each query, (B, T). None means `key_documents`.

    Returns:
        A mask for `attention` and all layers.

    >>> document_mask(torch.tensor([[0, 0, 1]])).dense(3, 3)[0, 0].int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    key_documents = torch.as_tensor(key_documents)
    query_documents = key_documents if query_documents is None else torch.as_tensor(query_documents)
    for ids in (key_documents, query_documents):
        if ids.ndim != 2:
            raise ArgumentError(f"document ids: must have shape (batch, tokens). Got shape {tuple(ids.shape)}.")
    return DocumentMask(query_documents, key_documents)


def per_head(masks: Sequence[Mask]) -> Mask:
    """Combine one mask per head.

    Args:
        masks: One mask per remaining head, in the order of the heads.

    Returns:
        A mask with a head axis.

    >>> per_head([causal(), window(1)]).dense(2, 2)[0].int().tolist()
    [[[1, 0], [1, 1]], [[1, 0], [0, 1]]]
    """
    if not masks:
        raise ArgumentError("masks: per_head needs at least one mask. Got none.")
    return PerHeadMask(tuple(_require_mask(mask) for mask in masks))


def and_masks(mask: Mask | None, other: Mask) -> Mask:
    """Return the conjunction of two masks, of which the first may be None."""
    if mask is None:
        return other
    if not isinstance(mask, Mask):
        raise ArgumentError(
            f"mask: must be a Mask. Got {type(mask).__name__}. Convert a tensor with hw.Mask.of(tensor)."
        )
    return mask & other


def slice_block(full: Tensor, rows: range, cols: range) -> Tensor:
    """Return a block of a (B, H, T, S) tensor. Axes of size 1 broadcast."""
    if full.shape[-2] > 1:
        full = full[..., rows.start : rows.stop, :]
    return full[..., cols.start : cols.stop] if full.shape[-1] > 1 else full


def _distance(rows: range, cols: range, shift: int, device: torch.device) -> Tensor:
    """Return the position of each query minus the position of each key, (R, C). Positive for earlier keys."""
    queries = torch.arange(rows.start + shift, rows.stop + shift, device=device)
    return queries[:, None] - torch.arange(cols.start, cols.stop, device=device)


def _clip_range(keys: range, S: int) -> range:
    start = min(max(0, keys.start), S)
    return range(start, min(max(start, keys.stop), S))


def _as_bool(tensor: Tensor, name: str) -> Tensor:
    if tensor.is_floating_point():
        raise ArgumentError(
            f"{name}: must be a bool or integer tensor, True at visible keys. Got {tensor.dtype}. Pass additive scores as "
            f"bias=, and convert torch's masks with headwise.kernels.torch_mask_conversion."
        )
    return tensor.bool()


def _require_mask(mask: object) -> Mask:
    if isinstance(mask, Mask):
        return mask
    raise ArgumentError(f"mask: must be a Mask. Got {type(mask).__name__}. Convert a tensor with hw.Mask.of(tensor).")
