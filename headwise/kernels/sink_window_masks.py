"""Heads that forget: a query sees the first tokens of the text and the last ones (https://arxiv.org/abs/2309.17453)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.kernels.masks import Both, Mask


@dataclass(frozen=True, eq=False)
class Streaming(Mask):
    """Key j is visible to query i when j < first or i − j < last; the text of a row begins at its `starts`, (B,), or at 0."""

    first: int
    last: int
    starts: Tensor | None = None

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        queries = torch.arange(rows.start + S - T, rows.stop + S - T, device=device)
        keys = torch.arange(cols.start, cols.stop, device=device)
        near = (queries[:, None] - keys < self.last)[None, None]  # (1, 1, R, C)
        begins = torch.zeros(1, dtype=torch.long, device=device) if self.starts is None else self.starts.to(device)
        return near | (keys - begins[:, None] < self.first)[:, None, None]  # (1 or B, 1, R, C)

    def keys(self, rows: range, T: int, S: int) -> range:
        return range(0 if self.first else min(S, max(0, rows.start + S - T - self.last + 1)), S)

    def planes(self) -> tuple[int, int]:
        return 1 if self.starts is None else len(self.starts), 1

    def is_full(self, T: int, S: int) -> bool:
        return self.first + self.last >= S

    def sees_itself(self, T: int, S: int) -> bool:
        return T <= S

    def may_be_empty(self, T: int, S: int) -> bool:
        return T > S


@dataclass(frozen=True, eq=False)
class Held(Mask):
    """Keys in any order, each with its place in the text: a query sees those up to its own that it has not forgotten.

    `queries` is (1 or B, T), `held` (1 or B, S): places counted from where the text of a row begins; below 0 is nothing.
    """

    queries: Tensor
    held: Tensor
    first: int
    last: int
    window: int | None = None  # of the layer: nothing is seen beyond it, not even the first tokens

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        at = self.held[:, None, None, cols.start : cols.stop]  # (1 or B, 1, 1, C)
        behind = self.queries[:, None, rows.start : rows.stop, None] - at  # (1 or B, 1, R, C)
        seen = (at >= 0) & (behind >= 0) & ((behind < self.last) | (at < self.first))
        return seen if self.window is None else seen & (behind < self.window)

    def planes(self) -> tuple[int, int]:
        return max(len(self.queries), len(self.held)), 1


@dataclass(frozen=True, eq=False)
class MaskColumns(Mask):
    """Some columns of a mask over `keys` keys, in any order: `places` is (1 or B, S); one below 0 stands for no key."""

    every: Mask
    places: Tensor
    keys_of: int
    rows_of: range  # which of all `queries_of` queries these are
    queries_of: int

    def block(self, rows: range, cols: range, T: int, S: int, device: torch.device) -> Tensor:
        asked = range(self.rows_of.start + rows.start, self.rows_of.start + rows.stop)
        whole = self.every.block(asked, range(self.keys_of), self.queries_of, self.keys_of, device)
        places = self.places[:, None, None, cols.start : cols.stop]  # (1 or B, 1, 1, C)
        return take_columns(whole, places, self.keys_of) & (places >= 0)

    def planes(self) -> tuple[int, int]:
        batch, heads = self.every.planes()
        return max(batch, len(self.places)), heads


def take_columns(full: Tensor, places: Tensor, keys: int) -> Tensor:
    """Columns of a (1 or B, 1 or H, 1 or R, 1 or S) tensor, by places (1 or B, 1, 1, C); below 0: any."""
    full = full.expand(max(len(full), len(places)), *full.shape[1:3], keys)
    places = places.clamp(min=0).expand(len(full), *full.shape[1:3], places.shape[-1])
    return full.gather(-1, places)


def all_parts(mask: Mask | None) -> tuple[Mask, ...]:
    """The masks that must all allow it."""
    if type(mask) is Both:
        return (*all_parts(mask.one), *all_parts(mask.other))
    return () if mask is None else (mask,)
