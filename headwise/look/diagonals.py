"""Attention by distance: the diagonals of a block, one by one near the query, by powers of two farther away."""

from dataclasses import dataclass

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
        S = batch.real.shape[1]
        rows = torch.arange(block.rows.start, block.rows.stop, device=e.device) + block.past
        target = rows[:, None] - torch.tensor(OFFSETS[wide], device=e.device)  # (R, o)
        first, column = batch.first[:, None, None], target.clamp(0, S - 1)
        inside = (target >= first) & (target < S) & batch.real[:, column] & self.real[..., None]  # (B, R, o)
        aimed = (inside & (target > first)).to(e)
        inside = inside.to(e)
        p = block.share(e)
        hits = (e == 1).to(e)  # the largest e is 1
        hits = hits / hits.sum(-1, keepdim=True).clamp(min=1)  # a tie is shared out
        valued = e * self.norms[..., column] / self.valued_total.clamp(min=1e-30)[..., None]
        uniform = (1 / block.visible.clamp(min=1)).to(e)[..., None].expand(len(e), -1, -1, p.shape[-1])
        for kind, values, counts in (
            ("offset", p, inside), ("argmax", hits, inside), ("aimed", p, aimed), ("aimed null", uniform, aimed),
            ("aimed valued", valued, aimed),
        ):  # fmt: skip
            out[kind][0][..., wide] += torch.einsum("bhro,bro->bho", values, counts)
            out[kind][1][..., wide] += counts.sum(1)[:, None]
        self._long(p.sum(-1), inside, valued.sum(-1), first, out["long"])
        return (e[..., WINDOW - 1] == 1) | (block.features[..., 2] == 1)

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
        null = (visible - inside.sum(-1)[:, None] - far_first - repeats) / visible.clamp(min=1)
        last = self.batch.real.sum(1)[:, None] - 1
        far = (place > WINDOW) | ((last - place >= WINDOW) & block.ahead)
        counts = (self.real & far).to(near)[:, None]  # rows that have something far to look at
        made = (mass - near - p_first - repeated, null.expand_as(near), 1 - near_valued - v_first - repeated_valued)
        out[0] += (torch.stack(made, -1).clamp(min=0) * counts[..., None]).sum(2)
        out[1] += counts.sum(2)[..., None]

    def _repeated(self) -> tuple[Tensor, Tensor, Tensor]:
        """Far keys that repeat the query's token, or follow one that does: their share of each row, valued, and count."""
        block, batch, e = self.block, self.batch, self.block.e
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
        found = torch.zeros(2, *block.total.shape, dtype=e.dtype, device=e.device)
        picked = e[b, :, r, c]  # (pairs, h)
        valued = picked * self.norms[b, :, c + block.cols.start]
        found[0].permute(0, 2, 1).index_put_((b, r), picked, accumulate=True)
        found[1].permute(0, 2, 1).index_put_((b, r), valued, accumulate=True)
        return block.share(found[0]), found[1] / self.valued_total.clamp(min=1e-30), same.sum(-1)[:, None].to(e)

    def far(self, out: Tensor) -> None:
        """Add up the bins beyond the window into (2, B, h, bins)."""
        block = self.block
        back = block.rows.stop + block.past - block.cols.start  # the farthest a row of this block can look, and ahead
        ahead = block.cols.stop - block.rows.start - block.past
        weight = block.share(self.real[:, None].to(block.e).expand_as(block.total))  # (B, h, R)
        for number, low in enumerate(EDGES):
            counts = self._rows_beyond(low)
            if counts is None:
                break
            for sign, reach in ((1, back), (-1, ahead)):
                high = min(2 * low, reach + 1)
                if low < high:
                    some = block.at(low, high) if sign > 0 else block.at(1 - high, 1 - low)
                    out[0, ..., number] += (some.sum(-1) * weight).sum(-1)
            out[1, ..., number] += counts

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
