"""Masks of streaming heads: a query sees the sink tokens and a window (https://arxiv.org/abs/2309.17453)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.masks import AndMask, Mask


@dataclass(frozen=True, eq=False)
class SinkWindowMask(Mask):
    """Key j is visible to query i if j < sink_tokens or i − j < window, counted from `row_starts`, (B,), or from 0."""

    sink_tokens: int
    window: int
    row_starts: Tensor | None = None

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        queries = torch.arange(rows.start + S - T, rows.stop + S - T, device=device)
        keys = torch.arange(cols.start, cols.stop, device=device)
        in_window = (queries[:, None] - keys < self.window)[None, None]  # (1, 1, R, C)
        starts = (
            torch.zeros(1, dtype=torch.long, device=device) if self.row_starts is None else self.row_starts.to(device)
        )
        return in_window | (keys - starts[:, None] < self.sink_tokens)[:, None, None]  # (1 or B, 1, R, C)

    def key_range(self, rows: range, T: int, S: int) -> range:
        return range(0 if self.sink_tokens else min(S, max(0, rows.start + S - T - self.window + 1)), S)

    def leading_shape(self) -> tuple[int, int]:
        return 1 if self.row_starts is None else len(self.row_starts), 1

    def is_full(self, T: int, S: int) -> bool:
        return self.sink_tokens + self.window >= S

    def allows_self(self, T: int, S: int) -> bool:
        return T <= S

    def may_have_empty_rows(self, T: int, S: int) -> bool:
        return T > S


@dataclass(frozen=True, eq=False)
class RingBufferMask(Mask):
    """Keys in any order, each with its position: a query sees the earlier keys that its policy has not evicted.

    `query_positions` is (1 or B, T), `key_positions` (1 or B, S). Positions count from the first real token of a row; below
    0 is an empty slot.
    """

    query_positions: Tensor
    key_positions: Tensor
    sink_tokens: int
    ring_size: int
    window: int | None = None  # window of the layer, which hides sink tokens too

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        positions = self.key_positions[:, None, None, cols.start : cols.stop]  # (1 or B, 1, 1, C)
        distance = self.query_positions[:, None, rows.start : rows.stop, None] - positions  # (1 or B, 1, R, C)
        visible = (positions >= 0) & (distance >= 0) & ((distance < self.ring_size) | (positions < self.sink_tokens))
        return visible if self.window is None else visible & (distance < self.window)

    def leading_shape(self) -> tuple[int, int]:
        return max(len(self.query_positions), len(self.key_positions)), 1


@dataclass(frozen=True, eq=False)
class ColumnSubsetMask(Mask):
    """Columns of a mask over `num_keys` keys, in any order: `columns` is (1 or B, S). A column below 0 is an empty slot."""

    mask: Mask
    columns: Tensor
    num_keys: int
    query_range: range  # indices of these queries among all `num_queries` queries
    num_queries: int

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        query_rows = range(self.query_range.start + rows.start, self.query_range.start + rows.stop)
        full = self.mask.block(query_rows, range(self.num_keys), self.num_queries, self.num_keys, device)
        columns = self.columns[:, None, None, cols.start : cols.stop]  # (1 or B, 1, 1, C)
        return gather_columns(full, columns, self.num_keys) & (columns >= 0)

    def leading_shape(self) -> tuple[int, int]:
        batch, heads = self.mask.leading_shape()
        return max(batch, len(self.columns)), heads


def gather_columns(full: Tensor, columns: Tensor, num_keys: int) -> Tensor:
    """Gather columns, (1 or B, 1, 1, C), of a (1 or B, 1 or H, 1 or R, 1 or S) tensor; a column below 0 gives any value."""
    full = full.expand(max(len(full), len(columns)), *full.shape[1:3], num_keys)
    columns = columns.clamp(min=0).expand(len(full), *full.shape[1:3], columns.shape[-1])
    return full.gather(-1, columns)


def flatten_and_mask(mask: Mask | None) -> tuple[Mask, ...]:
    """Return the masks whose conjunction a mask is."""
    if type(mask) is AndMask:
        return (*flatten_and_mask(mask.left), *flatten_and_mask(mask.right))
    return () if mask is None else (mask,)
