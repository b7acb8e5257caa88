"""Attention in blocks of rows: everything a measure needs of a map, while no map is ever held whole.

A block is (B, h, R, C): some heads, some queries, the keys those can see. It is made once, after the fused call that gave
the model its output, and is small enough to stay in the cache while all measures read it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headwise.heads.site import Seen
from headwise.kernels.terms import raw_scores, spread

ROWS = 128  # queries in a block
CELLS = 1 << 21  # scores in a block, about


@dataclass(frozen=True, eq=False)
class Block:
    """Some rows of some heads. Weights are left unnormalised: e = exp(score − the row's largest), 0 where nothing is seen."""

    heads: slice
    rows: range  # queries, by their place in this call
    cols: range  # keys
    past: int  # keys before the first query: the query of row i stands at place i + past
    e: Tensor  # (B, h, R, C)
    top: Tensor  # (B, h, R): the largest score
    total: Tensor  # (B, h, R): Σ e, and the sink's share
    energy: Tensor  # (B, h, R): Σ e · score
    features: Tensor  # (B, h, R, f): Σ e · what was asked to be summed over the keys
    allowed: Tensor | None  # (1 or B, 1 or h, R, C): which keys a row may see; None: all of them
    visible: Tensor  # (1 or B, 1 or h, R): how many those are

    def share(self, summed: Tensor) -> Tensor:
        """Sums of e as shares of the row: (B, h, R, …); a row that sees nothing has none."""
        total = self.total.clamp(min=torch.finfo(self.total.dtype).tiny)
        return summed / total.reshape(*total.shape, *[1] * (summed.ndim - total.ndim))

    def at(self, low: int, high: int) -> Tensor:
        """e, `low` to `high` − 1 places back from each query, the farthest first: (B, h, R, high − low).

        A view along the diagonals. Places outside the block read as 0.
        """
        e, R, C = self.e, len(self.rows), len(self.cols)
        start = self.rows.start + self.past - self.cols.start - (high - 1)  # the first row's first column
        end = start + R - 1 + high - low  # behind the last row's last column
        left, right = max(0, -start), max(0, end - C)
        if left or right:
            e = torch.nn.functional.pad(e, (left, right))
        b, h, r, _ = e.stride()
        sizes = (*e.shape[:2], R, high - low)
        return e.as_strided(sizes, (b, h, r + 1, 1), e.storage_offset() + start + left)

    @cached_property
    def log_total(self) -> Tensor:
        """logsumexp of the scores, (B, h, R)."""
        return self.top + self.total.clamp(min=torch.finfo(self.total.dtype).tiny).log()

    @cached_property
    def ahead(self) -> bool:
        """Whether rows may see keys that come after them, as an encoder's do."""
        behind = max(0, self.rows.start + self.past + 1 - self.cols.start)
        return behind < len(self.cols) and (self.allowed is None or bool(self.allowed[..., :1, behind:].any()))


def walk(seen: Seen, features: Tensor, every: int = 1) -> Iterator[Block]:
    """All blocks of a call, or one in so many; `features` (B or 1, H or 1, S, f) are summed over the keys, weighted by e."""
    q, k, terms = seen.q, seen.k, seen.terms
    B, H, T, d = q.shape
    S = k.shape[2]
    if not (B and H and T and S):
        return
    keys = spread(k, terms.groups)  # (B, H, S, d)
    plain = terms.bias is None and terms.softcap is None
    asked = features.to(q).expand(B, H, S, -1)
    asked = torch.cat((keys, asked), -1) if plain else asked  # Σ e·score is q · Σ e·k, for the price of a wider product
    h = max(1, min(H, CELLS // (B * min(ROWS, T) * S)))
    for first in range(0, H, h):
        heads = slice(first, min(first + h, H))
        some = terms.for_heads(range(heads.start, heads.stop), range(heads.start, heads.stop)) if h < H else terms
        for start in range(0, T, ROWS * every):
            rows = range(start, min(start + ROWS, T))
            cols = terms.keys(rows, T, S)
            part, near = q[:, heads, start : rows.stop], slice(cols.start, cols.stop)
            scaled = part * terms.scale if plain else part
            scores = scaled @ keys[:, heads, near].mT if plain else raw_scores(part, keys[:, heads, near], some)
            bias = some.bias_block(rows, cols, T, S)
            scores = scores if bias is None else scores + bias.to(scores.dtype)
            allowed = some.mask_block(rows, cols, T, S, q.device)
            if allowed is not None:
                scores.masked_fill_(~allowed, -torch.inf)
            top = scores.amax(-1)  # (B, h, R)
            top = top.masked_fill(top == -torch.inf, 0.0)  # a row that sees nothing
            if plain:
                e = scores.sub_(top[..., None]).exp_()
                summed = e @ asked[:, heads, near]  # (B, h, R, d + f)
                energy, summed = (scaled * summed[..., :d]).sum(-1), summed[..., d:]
            else:
                e = (scores - top[..., None]).exp()
                energy = (e * scores.masked_fill(e == 0, 0.0)).sum(-1)
                summed = e @ asked[:, heads, near]
            total = summed[..., 0]
            if some.sink is not None:
                above = some.sink.to(top.dtype)[:, None] - top
                total = total + above.clamp(max=80).exp()  # more would be infinite; keys have nothing left as it is
            visible = torch.full((1, 1, 1), len(cols)) if allowed is None else allowed.sum(-1)
            visible = visible.expand(*visible.shape[:2], len(rows))
            yield Block(heads, rows, cols, S - T, e, top, total, energy, summed, allowed, visible)
