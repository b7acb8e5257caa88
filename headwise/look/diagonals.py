"""Attention by distance: the diagonals of a block, one by one near the query, by powers of two farther away."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.look.inputs import Batch
from headwise.look.rows import Block

WINDOW = 32  # offsets kept one by one: 0 … 31 back, and as many ahead; what lies beyond is long range
EDGES = tuple(WINDOW << i for i in range(11))
OFFSETS = tuple(range(WINDOW - 1, -WINDOW, -1))  # farthest back first, as the diagonals lie

# At each offset: the mean weight there; the share of rows whose largest weight is there; and, over rows whose target is not
# the first token (a sink would collect those), the mean weight, what a uniform head would have, and the weight times
# the length of what it fetches, as a share of the row.
NEAR = ("offset", "argmax", "aimed", "aimed null", "aimed valued")
BINS = tuple(f"distance {low}-{2 * low - 1}" for low in EDGES)
# Beyond the window, the first token and repeated tokens left out: the weight, a uniform head's, and the valued weight.
LONG = ("long range", "long range null", "long range valued")


def near_names(kind: str) -> tuple[str, ...]:
    """The measures of one kind at each offset: `offset 1` is one back, `offset -1` one ahead."""
    return tuple(f"{kind} {offset}" for offset in OFFSETS)


@dataclass(frozen=True, eq=False)
class Diagonals:
    """What a block shows along its diagonals."""

    block: Block
    batch: Batch
    real: Tensor  # (B, R): rows that are tokens
    norms: Tensor  # (B, h, S): the length of what each key would write
    valued_total: Tensor  # (B, h, R): Σ e · norm

    def near(self, out: dict[str, Tensor]) -> Tensor:
        """Add up the window into (2, B, h, offsets) arrays; returns which rows rest, on the first or on themselves."""
        block, batch = self.block, self.batch
        wide = slice(0, 2 * WINDOW - 1 if block.ahead else WINDOW)
        e = block.at(1 - WINDOW if block.ahead else 0, WINDOW)  # (B, h, R, o)
        column, inside, aimed = self._once("near", lambda: self._targets(OFFSETS[wide], e))
        p = block.share(e)
        hits = (e == 1).to(e)  # the largest e is 1
        hits = hits / hits.sum(-1, keepdim=True).clamp(min=1)  # a tie is shared out
        valued = e * self.norms[..., column] / self.valued_total.clamp(min=1e-30)[..., None]
        uniform = (1 / block.visible.clamp(min=1)).to(e)[..., None].expand(len(e), -1, -1, p.shape[-1])
        for kind, values, counts in (
            ("offset", p, inside), ("argmax", hits, inside), ("aimed", p, aimed), ("aimed null", uniform, aimed),
            ("aimed valued", valued, aimed),
        ):  # fmt: skip
            out[kind][0][..., wide] += (values * counts[:, None]).sum(2)
            out[kind][1][..., wide] += counts.sum(1)[:, None]
        near = p.sum(-1)
        self._long(near, inside, valued.sum(-1), batch.first[:, None, None], out["long"])
        self._far(near, out["bins"])
        return (e[..., WINDOW - 1] == 1) | (block.features[..., 2] == 1)

    def _once(self, what: str, work: Callable[[], Any]) -> Any:
        """What does not depend on the head is the same at every layer and for every group of heads."""
        block = self.block
        key = (what, block.rows, block.cols, block.past, block.ahead, int(block.visible.sum()))  # windows may differ
        if key not in self.batch.memo:
            self.batch.memo[key] = work()
        return self.batch.memo[key]

    def _targets(self, offsets: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The column at each offset from each row, (R, o); which are tokens, and which of those not the first: (B, R, o)."""
        block, batch = self.block, self.batch
        S = batch.real.shape[1]
        rows = torch.arange(block.rows.start, block.rows.stop, device=like.device) + block.past
        target = rows[:, None] - torch.tensor(offsets, device=like.device)
        first, column = batch.first[:, None, None], target.clamp(0, S - 1)
        inside = (target >= first) & (target < S) & batch.real[:, column] & self.real[..., None]
        return column, inside.to(like), (inside & (target > first)).to(like)

    def _long(self, near: Tensor, inside: Tensor, near_valued: Tensor, first: Tensor, out: Tensor) -> None:
        """What is left of each row when the near, the first token and repeated tokens are taken away."""
        block = self.block
        place = (
            torch.arange(block.rows.start, block.rows.stop, device=near.device) + block.past - first[..., 0]
        )  # (B, R)
        far_first = (place >= WINDOW).to(near)[:, None]  # the first token is not among the near
        p_first = block.share(block.features[..., 2]) * far_first
        v_first = block.features[..., 2] * self.norms.gather(-1, first.expand(-1, near.shape[1], -1))
        v_first = v_first / self.valued_total.clamp(min=1e-30) * far_first
        repeated, repeated_valued, repeats = self._repeated()
        mass = block.share(block.features[..., 0])
        visible = block.visible.to(near)
        null = (visible - inside.sum(-1)[:, None] - far_first * self._sees_first(first) - repeats) / visible.clamp(
            min=1
        )
        last = self.batch.real.sum(1)[:, None] - 1
        far = (place > WINDOW) | ((last - place >= WINDOW) & block.ahead)
        counts = (self.real & far).to(near)[:, None]  # rows that have something far to look at
        made = (mass - near - p_first - repeated, null.expand_as(near), 1 - near_valued - v_first - repeated_valued)
        out[0] += (torch.stack(made, -1).clamp(min=0) * counts[..., None]).sum(2)
        out[1] += counts.sum(2)[..., None]

    def _sees_first(self, first: Tensor) -> Tensor:
        """Whether a row may see the first token at all, which a window can forbid: (B or 1, 1 or h, R or 1)."""
        block = self.block
        if block.cols.start > int(first.max()):
            return torch.zeros(1, 1, 1, device=first.device)
        if block.allowed is None:
            return torch.ones(1, 1, 1, device=first.device)
        column = (first - block.cols.start).clamp(0, len(block.cols) - 1)[..., None]  # (B, 1, 1, 1)
        allowed = block.allowed.expand(len(first), -1, -1, len(block.cols))
        seen = allowed.gather(-1, column.expand(*allowed.shape[:3], 1))[..., 0]
        return (seen & (first >= block.cols.start)).to(block.e)

    def _repeated(self) -> tuple[Tensor, Tensor, Tensor]:
        """Far keys that repeat the query's token, or follow one that does: their share of each row, valued, and count."""
        block, e = self.block, self.block.e
        b, r, c, counts = self._once("repeated", self._pairs)
        found = torch.zeros(2, *block.total.shape, dtype=e.dtype, device=e.device)
        picked = e[b, :, r, c]  # (pairs, h)
        valued = picked * self.norms[b, :, c + block.cols.start]
        found[0].permute(0, 2, 1).index_put_((b, r), picked, accumulate=True)
        found[1].permute(0, 2, 1).index_put_((b, r), valued, accumulate=True)
        return block.share(found[0]), found[1] / self.valued_total.clamp(min=1e-30), counts.to(e)

    def _pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where those keys are, by example, row and column of the block, and how many a row has, (B, 1, R)."""
        block, batch = self.block, self.batch
        ids = batch.ids.masked_fill(~batch.real, -1)
        rows = slice(block.rows.start + block.past, block.rows.stop + block.past)
        cols = slice(block.cols.start, block.cols.stop)
        before = torch.nn.functional.pad(ids, (1, 0), value=-2)[:, cols]
        query = ids[:, rows, None]
        place = torch.arange(ids.shape[1], device=ids.device)
        far = (place[rows, None] - place[cols]).abs() >= WINDOW  # (R, C)
        same = ((ids[:, None, cols] == query) | (before[:, None] == query)) & far & self.real[..., None]  # (B, R, C)
        same &= place[cols] > batch.first[:, None, None]
        if block.allowed is not None and block.allowed.shape[1] == 1:
            same &= block.allowed[:, 0]
        b, r, c = same.nonzero(as_tuple=True)
        return b, r, c, same.sum(-1)[:, None]

    def _far(self, near: Tensor, out: Tensor) -> None:
        """Add up the bins beyond the window into (2, B, h, bins); the last that is reached is what is left of the row."""
        block = self.block
        back = block.rows.stop + block.past - block.cols.start  # the farthest a row of this block can look, and ahead
        ahead = block.cols.stop - block.rows.start - block.past
        whole = back - len(block.rows)  # so far back every row can look
        real = self.real[:, None].to(near)
        left = block.share(block.features[..., 0]) - near  # (B, h, R)
        for number, low in enumerate(EDGES):
            counts = self._once(f"beyond {low}", lambda low=low: self._rows_beyond(low))
            if counts is None:
                break
            if not block.ahead and 2 * low > whole and back <= 2 * low:
                some = left
            else:
                some = self._bin(low, min(2 * low, back + 1), min(2 * low, ahead + 1))
                left = left - some
            out[0, ..., number] += (some * real).sum(-1)
            out[1, ..., number] += counts

    def _bin(self, low: int, back: int, ahead: int) -> Tensor:
        """The share of each row that lies from `low` to below these distances: (B, h, R)."""
        block, total = self.block, torch.zeros_like(self.block.total)
        if low < back:
            total = total + block.at(low, back).sum(-1)
        if low < ahead and block.ahead:
            total = total + block.at(1 - ahead, 1 - low).sum(-1)
        return block.share(total)

    def _rows_beyond(self, low: int) -> Tensor | None:
        """How many rows have a key at least so far away, (B, 1); None if none has."""
        block, batch = self.block, self.batch
        rows = torch.arange(block.rows.start, block.rows.stop, device=batch.ids.device) + block.past
        length = batch.real.sum(1)[:, None]
        place = rows - batch.first[:, None]
        reach = place >= low
        if block.ahead:
            reach = reach | (length - 1 - place >= low)
        counts = (reach & self.real).sum(1)[:, None]
        return counts if bool(counts.any()) else None
