"""Every number that a row of attention has, of all rows of one call: filled block by block, then measured at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from headwise.analysis.metrics.attention_call import Call
from headwise.analysis.metrics.batch_context import NORM, WINDOW, FarRepeats, Scene
from headwise.analysis.metrics.row_blocks import RowBlock, count_rows, sights, walk
from headwise.errors import HeadwiseError
from headwise.heads.hook_point import Seen
from headwise.kernels.score_params import Terms

EDGES = tuple(WINDOW << i for i in range(11))


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of one call, n of them: what a measure takes from. Sums are of e, as in `RowBlock`; `share` makes them parts of
    the row. Columns over the keys go by name: `part("digit")` is the weight on digits."""

    NORM: ClassVar[str] = NORM

    seen: Seen
    scene: Scene
    gram: Tensor  # (H, e, e): W_O W_Oᵀ
    norms: Tensor  # (B, H, S): the length of what each key would write
    places: Tensor  # (n,): where each query stands among the keys
    counted: Tensor  # (B, n): rows that are tokens
    ahead: bool  # whether keys behind the query are seen
    visible: Tensor  # (1 or B, 1 or H, n): keys a row may see
    marks: Tensor  # (B, 1 or H, n, c): and what they have of each mark
    sees_first: Tensor  # (B, 1 or H, n): whether the first token is seen, which a window may forbid
    sees: dict[str, Tensor]  # (B, 1 or H, n) for each aim: whether there is something to look at, and it is seen
    total: Tensor  # (B, H, n)
    energy: Tensor  # (B, H, n)
    features: Tensor  # (B, H, n, f): Σ e · column, for each column of the layout
    square: Tensor  # (B, H, n): Σ e²
    near: Tensor  # (B, H, n, o): e at each offset of the window, farthest back first
    beyond: Tensor | None  # (B, H, n): Σ e · (j − i) over the keys that come after the query; None: it sees none
    aimed: dict[str, Tensor]  # (B, H, n): e where each aim leads

    def share(self, summed: Tensor) -> Tensor:
        """Sums of e as parts of the row: (B, H, n, …); nothing for padding and for a row that sees nothing."""
        return summed * self._inverse.reshape(*self._inverse.shape, *[1] * (summed.ndim - self._inverse.ndim))

    def on(self, column: str) -> Tensor:
        """Σ e · column, (B, H, n)."""
        return self.features[..., self.scene.layout.place[column]]

    def part(self, column: str) -> Tensor:
        """The same as a part of the row."""
        return self._shares[..., self.scene.layout.place[column]]

    def valued(self, column: str) -> Tensor:
        """Σ p · column · what each key writes, (B, H, n), of a mark."""
        return self._shares[..., self.scene.layout.valued[column]]

    def marked(self, column: str) -> Tensor:
        """What the visible keys have of a mark, (B, 1 or H, n)."""
        return self.marks[..., self.scene.layout.marks.index(column)]

    def has(self, aim: str) -> Tensor:
        """Which rows have a key to look at, seen or not, (B, 1, n)."""
        return (self.scene.aims[aim][:, self.places] >= 0)[:, None]

    def at(self, aim: str) -> tuple[Tensor, Tensor]:
        """The weight where an aim leads, and the share of what is fetched that comes from there, (B, H, n) each."""
        e = self.aimed[aim]
        return self.share(e), e * self._norms_at(aim) * self.inverse_valued

    @cached_property
    def hits(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For each aim whether the largest weight is there, and the largest of what is fetched: (B, H, n) each."""
        raise HeadwiseError(
            "the largest weights are known only after a walk over every cell; give the measure full=True, which leaves it "
            "out of a light pass."
        )

    @cached_property
    def inverse_valued(self) -> Tensor:
        """1 / Σ e·norm of each row that counts, (B, H, n)."""
        return self.counted[:, None] / self.on(NORM).clamp(min=1e-30)

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.where(self.counted[:, None] & (self.total > 0), 1 / self.total, 0.0)

    @cached_property
    def _shares(self) -> Tensor:
        return self.share(self.features)

    def _norms_at(self, aim: str) -> Tensor:
        target = self.scene.aims[aim][:, self.places].clamp(min=0)[:, None]  # (B, 1, n)
        return self.norms.gather(-1, target.expand(-1, self.norms.shape[1], -1))


@dataclass(frozen=True, eq=False)
class Full(Rows):
    """And what only a walk over all cells can tell."""

    top: Tensor  # (B, H, n): the largest e at a key that is no special token
    far: Tensor  # (B, H, n, bins): by powers of two beyond the window
    last: Tensor  # (n,): the bin that has what is left over; -1: none
    repeats: Tensor  # (B, 1, n): far keys that repeat the query's token or follow one that does
    repeated: Tensor  # (2, B, H, n): e on the repeats, and e times the length of what it fetches
    equals: Tensor | None  # (B, H, n): how many keys have the largest e; where hits are asked
    heaviest: Tensor | None  # (2, B, H, n): the largest e times what is fetched, and how many keys have it

    @cached_property
    def hits(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For each aim whether the largest weight is there, and the largest of what is fetched: (B, H, n) each. Of equals
        each has its share."""
        assert self.equals is not None
        assert self.heaviest is not None
        most, tied = self.heaviest
        return {
            name: (
                e.floor() / self.equals.clamp(min=1),
                (e * self._norms_at(name) >= most) * (most > 0) / tied.clamp(min=1),
            )
            for name, e in self.aimed.items()
        }


See = Callable[[RowBlock], None]


def fill_rows(call: Call, every: int = 1, see: Sequence[See] = ()) -> Full:
    """Walk over a call, or over one block of rows in so many; `see` are shown each block as it goes by."""
    seen, scene, norms, inputs = call.seen, call.scene, call.norms, call.inputs
    (B, H, T, _), S, device = seen.q.shape, seen.k.shape[2], inputs.device
    n, ahead = count_rows(T, every), looks_ahead(seen.terms, T, S, inputs.device)
    new, hits = inputs.new_zeros, any(aim.hits for aim in scene.layout.aims)
    total, energy, square, top = (new(B, H, n) for _ in range(4))
    features, far, repeated = new(B, H, n, inputs.shape[-1]), new(B, H, n, len(EDGES)), new(2, B, H, n)
    near, last = new(B, H, n, 2 * WINDOW - 1 if ahead else WINDOW), torch.full((n,), -1, device=device)
    beyond = new(B, H, n) if ahead else None
    aimed = {name: new(B, H, n) for name in scene.aims}
    equals, heaviest = (new(B, H, n), new(2, B, H, n)) if hits else (None, None)
    about, repeats = scene.about(seen.terms, T, S, every), new(B, 1, n)
    slot, pairs = slice(0, 0), None
    for block in walk(seen, inputs, every, scene.seen, scene.inner):
        heads = block.heads
        if heads.start == 0:
            slot = slice(slot.stop, slot.stop + len(block.rows))
            pairs = scene.pairs(block.sight)
            repeats[..., slot] = pairs.repeats.to(repeats)
        for into, made in ((total, block.total), (energy, block.energy), (features, block.features)):
            into[:, heads, slot] = made
        torch.linalg.vector_norm(block.e, dim=-1, out=square[:, heads, slot])
        near[:, heads, slot] = block.at(1 - WINDOW if ahead else 0, WINDOW)
        top[:, heads, slot] = block.largest if scene.inner is not None else _ordinary_top(block, scene.ordinary)
        _add_bins(block, ahead, far[:, heads, slot], last[slot])
        _add_repeated(block, pairs, norms, repeated[:, :, heads, slot])
        if beyond is not None:
            _add_beyond(block, beyond[:, heads, slot])
        for name, into in aimed.items():
            into[:, heads, slot] = _at_aim(block, scene.aims[name][:, about["places"][slot]])
        if equals is not None and heaviest is not None:
            equals[:, heads, slot] = (block.e == 1).sum(-1).to(equals)
            _add_heaviest(block, norms, heaviest[:, :, heads, slot])
        for one in see:
            one(block)
    return Full(
        seen, scene, call.gram, norms, **about, ahead=ahead, total=total, energy=energy, features=features,
        square=square.square_(), near=near, beyond=beyond, aimed=aimed, top=top, far=far, last=last,
        repeats=repeats, repeated=repeated, equals=equals,
        heaviest=heaviest,
    )  # fmt: skip


def looks_ahead(terms: Terms, T: int, S: int, device: torch.device) -> bool:
    """Whether any row sees a key that comes after it. What is causal by its make is known without reading a mask."""
    past = S - T
    if all(terms.keys(range(i, i + 1), T, S).stop <= i + past + 1 for i in {0, T // 2}):
        return False
    return any(sight.ahead for sight in sights(terms, T, S, device))


def _ordinary_top(block: RowBlock, ordinary: Tensor) -> Tensor:
    """The largest e at an ordinary key, (B, h, R), where special tokens stand within texts; `ordinary` (B, S)."""
    there = ordinary[:, None, None, block.cols.start : block.cols.stop].to(block.e)
    return torch.mul(block.e, there, out=block.scratch).amax(-1)


def _add_bins(block: RowBlock, ahead: bool, out: Tensor, last: Tensor) -> None:
    """Sums beyond the window, by powers of two, into (B, h, R, bins). What a causal row has left is not summed: it is what
    all the rest leaves over, and `last` (R,) says to which bin it belongs."""
    back = block.rows.stop + block.past - block.cols.start  # the farthest a row of this block can look, and ahead
    after = block.cols.stop - block.rows.start - block.past
    whole = back - len(block.rows)  # so far back every row can look
    for number, low in enumerate(EDGES):
        if low >= back and (low >= after or not ahead):
            return
        if not ahead and 2 * low > whole and back <= 2 * low:
            last[:] = number
            return
        if low < back:
            torch.sum(block.at(low, min(2 * low, back + 1)), -1, out=out[..., number])
        if low < after and ahead:
            out[..., number] += block.at(1 - min(2 * low, after + 1), 1 - low).sum(-1)


def _add_beyond(block: RowBlock, out: Tensor) -> None:
    """How far ahead rows look, into (B, h, R)."""
    start = block.rows.start + block.past  # what stands before the first query is ahead of none
    cols = slice(max(0, start - block.cols.start), None)
    keys = torch.arange(block.cols.start, block.cols.stop, device=out.device)[cols]
    queries = torch.arange(len(block.rows), device=out.device)[:, None] + start
    steps = (keys - queries).clamp(min=0).to(block.e)  # (R, C')
    torch.sum(torch.mul(block.e[..., cols], steps, out=block.scratch[..., cols]), -1, out=out)


def _add_repeated(block: RowBlock, pairs: FarRepeats | None, norms: Tensor, out: Tensor) -> None:
    """The weight on repeated tokens, and what it fetches, into (2, B, h, R)."""
    if pairs is None or not len(pairs.row):
        return
    b, r, c = pairs.example, pairs.row, pairs.column
    picked = block.e[b, :, r, c]  # (pairs, h)
    both = torch.stack((picked, picked * norms[:, block.heads][b, :, c + block.cols.start]), 1)
    out.permute(1, 3, 0, 2).index_put_((b, r), both, accumulate=True)


def _at_aim(block: RowBlock, target: Tensor) -> Tensor:
    """e where each row should look, (B, h, R); 0 where that is not in the block. `target` (B, R)."""
    column = target - block.cols.start
    inside = (column >= 0) & (column < len(block.cols))
    index = column.clamp(0, len(block.cols) - 1)[:, None, :, None].expand(-1, block.e.shape[1], -1, 1)
    return block.e.gather(-1, index)[..., 0] * inside[:, None]


def _add_heaviest(block: RowBlock, norms: Tensor, out: Tensor) -> None:
    """The largest e times what is fetched, and how many keys have it, into (2, B, h, R)."""
    fetched = norms[:, block.heads, None, block.cols.start : block.cols.stop]
    made = torch.mul(block.e, fetched, out=block.scratch)
    torch.amax(made, -1, out=out[0])
    out[1] = (made == out[0][..., None]).sum(-1).to(out)
