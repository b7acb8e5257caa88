"""Heads that forget: a query sees the first tokens of the text and the last ones (https://arxiv.org/abs/2309.17453)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.masks import AndMask, Mask


@dataclass(frozen=True, eq=False)
class SinkWindowMask(Mask):
    """Key j is visible to query i when j < first or i − j < last; the text of a row begins at its `starts`, (B,), or at 0."""

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
    """Keys in any order, each with its place in the text: a query sees those up to its own that it has not forgotten.

    `query_positions` is (1 or B, T), `key_positions` (1 or B, S): places counted from where the text of a row
    begins; below 0 is nothing.
    """

    query_positions: Tensor
    key_positions: Tensor
    sink_tokens: int
    ring_size: int
    window: int | None = None  # of the layer: nothing is seen beyond it, not even the first tokens

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        positions = self.key_positions[:, None, None, cols.start : cols.stop]  # (1 or B, 1, 1, C)
        distance = self.query_positions[:, None, rows.start : rows.stop, None] - positions  # (1 or B, 1, R, C)
        visible = (positions >= 0) & (distance >= 0) & ((distance < self.ring_size) | (positions < self.sink_tokens))
        return visible if self.window is None else visible & (distance < self.window)

    def leading_shape(self) -> tuple[int, int]:
        return max(len(self.query_positions), len(self.key_positions)), 1


@dataclass(frozen=True, eq=False)
class ColumnSubsetMask(Mask):
    """Some columns of a mask over `num_keys` keys, in any order: `columns` is (1 or B, S); one below 0 stands for no key."""

    mask: Mask
    columns: Tensor
    num_keys: int
    query_range: range  # which of all `num_queries` queries these are
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
    """Columns of a (1 or B, 1 or H, 1 or R, 1 or S) tensor, by places (1 or B, 1, 1, C); below 0: any."""
    full = full.expand(max(len(full), len(columns)), *full.shape[1:3], num_keys)
    columns = columns.clamp(min=0).expand(len(full), *full.shape[1:3], columns.shape[-1])
    return full.gather(-1, columns)


def flatten_and_mask(mask: Mask | None) -> tuple[Mask, ...]:
    """The masks that must all allow it."""
    if type(mask) is AndMask:
        return (*flatten_and_mask(mask.left), *flatten_and_mask(mask.right))
    return () if mask is None else (mask,)
