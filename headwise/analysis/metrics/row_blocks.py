"""Attention in blocks of rows: everything a measure needs of a map, while no map is ever held whole.

A block is (B, h, R, C): some heads, some queries, the keys those can see. It is made after the fused call that gave the
model its output, is small enough to stay in the cache while all measures read it, and its memory is used again by the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen
from headwise.heads.per_head_output import gram, lengths
from headwise.kernels import Mask
from headwise.kernels.precision import at_least_float32
from headwise.kernels.score_params import Terms, spread

ROWS = 64  # queries in a block
CELLS = 1 << 22  # scores in a block, about
LOWEST = -1e30  # the score of what is not seen: finite, so that 0 · score is 0
PIECE = (
    4096  # keys that meet a block of rows at once while sights, and what is known of them, are made: see `Scene.about`
)
KEPT = 1 << 23  # cells of sights that are kept from layer to layer; more are made again


@dataclass(frozen=True, eq=False)
class Sight:
    """Some rows, and which keys they may see: the same for all heads, but for masks that tell heads apart."""

    rows: range  # queries, by their place in this call
    cols: range  # keys
    past: int  # keys before the first query: the query of row i stands at place i + past
    mask: Mask | None  # whose sight it is
    visible: Tensor  # (1 or B, 1 or H, R): how many keys a row may see
    part: slice  # the columns in which some are not seen: of a causal block nothing but its last corner
    seen: Tensor  # (1 or B, 1 or H, R, P): which of those are

    def allowed(self, piece: slice = slice(None)) -> Tensor:
        """All of it, or some of its columns: (1 or B, 1 or H, R, C)."""
        first, end, _ = piece.indices(len(self.cols))
        made = torch.ones(*self.seen.shape[:3], end - first, dtype=torch.bool, device=self.seen.device)
        low, high = max(first, self.part.start), min(end, self.part.stop)
        if low < high:
            made[..., low - first : high - first] = self.seen[..., low - self.part.start : high - self.part.start]
        return made

    def sees(self, keys: Tensor) -> Tensor:
        """Whether each row sees one key, `keys` (B, R) or (B, 1) by their places; none is below 0: (B, 1 or H, R)."""
        column = (keys - self.cols.start).expand(-1, len(self.rows))  # (B, R)
        there = ((column >= 0) & (column < len(self.cols)))[:, None]  # (B, 1, R)
        if self.part.start == self.part.stop:
            return there
        inner = column - self.part.start
        known = ((inner >= 0) & (inner < self.seen.shape[-1]))[:, None]
        index = inner.clamp(0, self.seen.shape[-1] - 1)[:, None, :, None]  # (B, 1, R, 1)
        seen = self.seen.expand(len(column), -1, -1, -1)
        return there & (~known | seen.gather(-1, index.expand(-1, seen.shape[1], -1, -1))[..., 0])

    def sums(self, values: Tensor) -> Tensor:
        """Sums over the keys each row sees, of `values` (B, S, c): (B, 1 or H, R, c)."""
        inside = slice(self.cols.start + self.part.start, self.cols.start + self.part.stop)
        before, behind = values[:, self.cols.start : inside.start], values[:, inside.stop : self.cols.stop]
        whole = (before.sum(1) + behind.sum(1))[:, None, None]  # (B, 1, 1, c): of the columns all rows see
        return self.seen.to(values) @ values[:, None, inside] + whole

    @cached_property
    def ahead(self) -> bool:
        """Whether rows may see keys that come after them, as an encoder's do."""
        place = self.rows.start + self.past - self.cols.start  # the first query's column
        return len(self.cols) > place + 1 and bool(self.allowed().triu(place + 1).any())


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Some rows of some heads. Weights are left unnormalised: e = exp(score − the row's largest), 0 where nothing is seen.

    `e` lives until the next block is made.
    """

    heads: slice
    sight: Sight
    e: Tensor  # (B, h, R, C)
    total: Tensor  # (B, h, R): Σ e, and the sink's share
    energy: Tensor  # (B, h, R): Σ e · (score − the largest)
    features: Tensor  # (B, h, R, f): Σ e · what was asked to be summed over the keys
    largest: Tensor  # (B, h, R): the largest e among the columns named to `walk`
    scratch: Tensor  # (B, h, R, C): memory that is free
    rows: range = field(init=False)
    cols: range = field(init=False)
    past: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "past"):
            object.__setattr__(self, name, getattr(self.sight, name))

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


@dataclass(eq=False)
class KeptSights:
    """What was made for one layer and serves the next."""

    made: dict[tuple[Mask | None, range, int, int], Sight] = field(default_factory=dict)  # by mask, rows, T and S
    cells: int = 0

    def of(self, terms: Terms, rows: range, T: int, S: int, device: torch.device) -> Sight:
        """What some rows may see. A mask that is no corner of a block has as many cells as a map: few of those are kept."""
        key = (terms.mask, rows, T, S)
        if key in self.made:
            return self.made[key]
        sight = _sight(terms, rows, T, S, device)
        if self.cells + sight.seen.numel() <= KEPT:
            self.made[key] = sight
            self.cells += sight.seen.numel()
        return sight


def sights(
    terms: Terms, T: int, S: int, device: torch.device, every: int = 1, known: KeptSights | None = None
) -> Iterator[Sight]:
    """What the rows of a call may see, block by block, or one block in so many. `known` keeps it for the next layer."""
    for rows in row_blocks(T, every):
        yield (known or KeptSights()).of(terms, rows, T, S, device)


def _sight(terms: Terms, rows: range, T: int, S: int, device: torch.device) -> Sight:
    cols = terms.keys(rows, T, S) or range(1)
    if terms.mask is None or terms.mask.is_full(T, S):
        visible, nothing = torch.full((1, 1, len(rows)), len(cols), device=device), torch.ones(1, 1, len(rows), 0)
        return Sight(rows, cols, S - T, terms.mask, visible, slice(0, 0), nothing.bool().to(device))
    mask, hidden = terms.mask, [cols.stop, cols.start - 1]  # the first and the last column in which something is
    visible = torch.zeros(1, 1, len(rows), dtype=torch.long, device=device)

    def block(some: range) -> Tensor:
        return mask.block(rows, some, T, S, device).expand(-1, -1, len(rows), len(some))  # (1 or B, 1 or H, R, c)

    for some in pieces(cols):
        allowed = block(some)
        visible = visible + allowed.sum(-1)
        columns = (~allowed).flatten(0, -2).any(0).nonzero()[:, 0]
        if len(columns):
            hidden = [min(hidden[0], some[int(columns[0])]), some[int(columns[-1])]]
    part = range(hidden[0], hidden[1] + 1) or range(cols.start, cols.start)
    columns = slice(part.start - cols.start, part.stop - cols.start)
    return Sight(rows, cols, S - T, mask, visible, columns, block(part).clone())


def pieces(cols: range) -> Iterator[range]:
    """Columns a piece at a time.

    >>> list(pieces(range(2, 5000)))
    [range(2, 4098), range(4098, 5000)]
    """
    return (range(first, min(first + PIECE, cols.stop)) for first in range(cols.start, cols.stop, PIECE))


def row_blocks(T: int, every: int = 1) -> Iterator[range]:
    """The blocks of rows a walk reads: all, or of each run of so many the one in its middle, as the first sees least.

    >>> list(row_blocks(130)), list(row_blocks(64 * 20, every=16))
    ([range(0, 64), range(64, 128), range(128, 130)], [range(512, 576), range(1152, 1216)])
    """
    for first in range(0, T, ROWS * every):
        blocks = -(-(min(first + ROWS * every, T) - first) // ROWS)
        start = first + ROWS * (blocks // 2)
        yield range(start, min(start + ROWS, T))


def count_rows(T: int, every: int = 1) -> int:
    """How many rows a walk reads."""
    return sum(map(len, row_blocks(T, every)))


def walk(
    seen: Seen, features: Tensor, every: int = 1, known: KeptSights | None = None, inner: range | None = None
) -> Iterator[RowBlock]:
    """All blocks of a call, or one in so many; `features` (B or 1, H or 1, S, f) are summed over the keys, weighted by e.

    The first feature is 1 for every key. `known` is where `sights` are kept. The largest weight is told of all columns, or of
    the `inner` ones.
    """
    terms, (B, H, T, _) = seen.terms, seen.q.shape
    S = seen.k.shape[2]
    if not (B and H and T and S):
        return
    queries = at_least_float32(seen.q) * terms.scale  # (B, H, T, d)
    keys, dtype = spread(seen.k.to(queries), terms.groups), queries.dtype  # (B, H, S, d)
    asked = (
        features.to(dtype).expand(B, H, S, -1).mT.contiguous()
    )  # (B, H, f, S): a product with few rows is the quicker one
    h = max(1, min(H, CELLS // (B * min(ROWS, T) * S)))
    room = queries.new_empty(2, B * h * min(ROWS, T) * S)
    for sight in sights(terms, T, S, queries.device, every, known):
        rows, cols = (slice(r.start, r.stop) for r in (sight.rows, sight.cols))
        bias = terms.bias_block(sight.rows, sight.cols, T, S)
        keep = sight.seen.to(dtype)  # (1 or B, 1 or H, R, P)
        forbid = (1 - keep) * LOWEST
        for first in range(0, H, h):
            heads = slice(first, min(first + h, H))
            shape = (B, heads.stop - first, len(sight.rows), len(sight.cols))
            scores, e = (one[: prod(shape)].view(shape) for one in room)
            torch.matmul(queries[:, heads, rows], keys[:, heads, cols].mT, out=scores)
            if terms.softcap is not None:
                scores.div_(terms.softcap).tanh_().mul_(terms.softcap)
            if bias is not None:
                scores.add_(_of(bias, heads)).clamp_(min=LOWEST)  # it may say −inf
            corner = scores[..., sight.part]
            if corner.shape[-1]:
                corner.add_(_of(forbid, heads))
            most, top = _largest(scores, sight.cols, inner)  # (B, h, R) each
            largest = (most - top).exp_() * (most > LOWEST / 2)
            scores.sub_(top[..., None])
            if corner.shape[-1]:
                corner.mul_(_of(keep, heads))  # exp is many times slower where it underflows
            torch.exp(scores, out=e)
            if corner.shape[-1]:
                e[..., sight.part].mul_(_of(keep, heads))
            if bias is not None:
                e.mul_((top > LOWEST / 2)[..., None])  # a row to which it forbids everything
            summed = (asked[:, heads, :, cols] @ e.mT).mT  # (B, h, R, f)
            energy = scores.mul_(e).sum(-1)  # (B, h, R)
            total = summed[..., 0]
            if terms.sink is not None:
                above = terms.sink[heads].to(top)[:, None] - top
                total = total + above.clamp(max=80).exp()  # more would be infinite; keys have nothing left as it is
            yield RowBlock(heads, sight, e, total, energy, summed, largest, scratch=scores)


def _largest(scores: Tensor, cols: range, inner: range | None) -> tuple[Tensor, Tensor]:
    """The largest score of each row among the inner columns, and among all of them: (B, h, R) each."""
    if inner is None:
        inner = cols
    low, high = (min(max(end - cols.start, 0), len(cols)) for end in (inner.start, inner.stop))
    parts = [scores[..., low:high], scores[..., :low], scores[..., high:]]
    nothing = scores.new_full(scores.shape[:-1], LOWEST)
    most, *others = (part.amax(-1) if part.shape[-1] else nothing for part in parts)
    return most, torch.maximum(most, torch.maximum(*others)) if any(part.shape[-1] for part in parts[1:]) else most


def fetched(seen: Seen, of: Tensor | None = None) -> Tensor:
    """The length of what each head would write if it looked at one key alone, ‖v W_O[h]‖: (B, H, S). `of`: W_O's gram.

    NaN, and so what is made of it, where W_O cannot be shown.
    """
    if of is None:
        try:
            of = gram(seen.site.W_O)
        except HeadwiseError:
            of = unknown_gram(seen)
    return lengths(spread(seen.v, seen.terms.groups), of)


def unknown_gram(seen: Seen) -> Tensor:
    """What stands for W_O W_Oᵀ where W_O cannot be shown: NaN, (H, e, e)."""
    H, e = seen.z.shape[1], seen.z.shape[-1]
    return at_least_float32(seen.z.new_full((H, e, e), torch.nan))


def _of(x: Tensor, heads: slice) -> Tensor:
    """The part of some heads, where heads differ."""
    return x if x.shape[1] == 1 else x[:, heads]
