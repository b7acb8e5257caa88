"""Every number that a row of attention has, of all rows of one call: filled block by block, then measured at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.heads.site import Seen
from headwise.kernels.terms import Terms
from headwise.look.inputs import Batch
from headwise.look.rows import Block, Sight, count_rows, sights, walk

WINDOW = 32  # offsets kept one by one: 0 … 31 back, and as many ahead; what lies beyond is long range
EDGES = tuple(WINDOW << i for i in range(11))


@dataclass(eq=False)
class Rows:
    """Rows of one call, n of them. Sums are of e, as in `Block`; `share` makes them parts of the row."""

    places: Tensor  # (n,): where each query stands among the keys
    counted: Tensor  # (B, n): rows that are tokens
    ahead: bool  # whether keys behind the query are seen
    visible: Tensor  # (1 or B, 1 or H, n): keys a row may see
    classes: Tensor  # (B, 1 or H, n, c): and how many of those are in each class
    sees_first: Tensor  # (B, 1 or H, n): whether the first token is seen, which a window may forbid
    total: Tensor  # (B, H, n)
    energy: Tensor  # (B, H, n)
    features: Tensor  # (B, H, n, f)
    square: Tensor  # (B, H, n): Σ e²
    near: Tensor  # (B, H, n, o): e at each offset of the window, farthest back first
    beyond: Tensor | None  # (B, H, n): Σ e · (j − i) over the keys that come after the query; None: it sees none

    def share(self, summed: Tensor) -> Tensor:
        """Sums of e as parts of the row: (B, H, n, …); nothing for padding and for a row that sees nothing."""
        inverse = torch.where(self.counted[:, None] & (self.total > 0), 1 / self.total, 0.0)
        return summed * inverse.reshape(*inverse.shape, *[1] * (summed.ndim - inverse.ndim))


@dataclass(eq=False)
class Full(Rows):
    """And what only a walk over all cells can tell."""

    top: Tensor  # (B, H, n): the largest e at a key that is no special token
    far: Tensor  # (B, H, n, bins): by powers of two beyond the window
    last: Tensor  # (n,): the bin that has what is left over; -1: none
    repeats: Tensor  # (B, 1, n): far keys that repeat the query's token or follow one that does
    repeated: Tensor  # (2, B, H, n): e on the repeats, and e times the length of what it fetches


See = Callable[[Block, Full, slice], None]


def gather(
    seen: Seen, batch: Batch, inputs: Tensor, flags: Tensor, norms: Tensor, every: int = 1, see: See | None = None
) -> Full:
    """Walk over a call, or over one block of rows in so many. `flags` (B, S, c) are the classes of the keys, the second of
    them special tokens; `norms` (B, H, S) the length of what each key writes; `see` is shown each block as it goes by."""
    rows = _empty(seen, inputs, every)
    ordinary = (flags[..., 1] == 0) & batch.real  # (B, S)
    known: list[Known] = []
    pairs: list[Pairs] = []
    slot = slice(0, 0)
    for block in walk(seen, inputs, every, batch.memo):
        heads = block.heads
        if heads.start == 0:
            known.append(known_of(block.sight, batch, flags))
            pairs.append(_once(batch, "pairs", block.sight, lambda s=block.sight: _pairs(s, batch)))
            slot = slice(slot.stop, slot.stop + len(block.rows))
        for name in ("total", "energy", "features"):
            getattr(rows, name)[:, heads, slot] = getattr(block, name)
        torch.linalg.vector_norm(block.e, dim=-1, out=rows.square[:, heads, slot])
        rows.near[:, heads, slot] = block.at(1 - WINDOW if rows.ahead else 0, WINDOW)
        _add_top(block, ordinary[:, block.cols.start : block.cols.stop], rows.top[:, heads, slot])
        _add_bins(block, rows.ahead, rows.far[:, heads, slot], rows.last[slot])
        _add_repeated(block, pairs[-1], norms, rows.repeated[:, :, heads, slot])
        if rows.beyond is not None:
            _add_beyond(block, rows.beyond[:, heads, slot])
        if see is not None:
            see(block, rows, slot)
    rows.square.square_()
    rows.repeats = torch.cat([one.repeats for one in pairs], 2).to(inputs)
    for name, value in join(known, batch).items():
        setattr(rows, name, value)
    return rows


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of some rows whatever the weights are."""

    places: Tensor  # (R,)
    visible: Tensor  # (1 or B, 1 or H, R)
    classes: Tensor  # (B, 1 or H, R, c)
    sees_first: Tensor  # (B, 1 or H, R)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Far keys that repeat the token of a row, or follow one that does."""

    example: Tensor  # (pairs,)
    row: Tensor  # (pairs,): of the block
    column: Tensor  # (pairs,)
    repeats: Tensor  # (B, 1, R): how many a row has


def join(known: list[Known], batch: Batch) -> dict[str, Any]:
    """The same for all rows of a call."""
    places = torch.cat([one.places for one in known])  # (n,)
    made: dict[str, Any] = {"places": places, "counted": batch.real[:, places]}
    for name in ("visible", "classes", "sees_first"):
        parts = [getattr(one, name) for one in known]
        most = [max(part.shape[axis] for part in parts) for axis in (0, 1)]
        made[name] = torch.cat([part.expand(*most, *part.shape[2:]) for part in parts], 2)
    return made


def known_of(sight: Sight, batch: Batch, flags: Tensor) -> Known:
    """What is known of the rows of a sight; worked out once for all layers."""
    return _once(batch, "known", sight, lambda: _known(sight, batch, flags))


def _once(batch: Batch, what: str, sight: Sight, work: Callable[[], Any]) -> Any:
    key = (what, sight.mask, sight.rows, sight.past)
    if key not in batch.memo:
        batch.memo[key] = work()
    return batch.memo[key]


def _known(sight: Sight, batch: Batch, flags: Tensor) -> Known:
    device = flags.device
    places = torch.arange(sight.rows.start, sight.rows.stop, device=device) + sight.past  # (R,)
    allowed = sight.allowed()  # (1 or B, 1 or H, R, C)
    classes = allowed.to(flags) @ flags[:, None, sight.cols.start : sight.cols.stop]  # (B, 1 or H, R, c)
    keys = torch.arange(sight.cols.start, sight.cols.stop, device=device)
    first = (keys == batch.first[:, None])[:, None, None]  # (B, 1, 1, C)
    return Known(places, sight.visible, classes, (allowed & first).any(-1).to(flags))


def _pairs(sight: Sight, batch: Batch) -> Pairs:
    device, cols = batch.ids.device, slice(sight.cols.start, sight.cols.stop)
    places = torch.arange(sight.rows.start, sight.rows.stop, device=device) + sight.past  # (R,)
    keys = torch.arange(sight.cols.start, sight.cols.stop, device=device)  # (C,)
    ids = batch.ids.masked_fill(~batch.real, -1)
    before = torch.nn.functional.pad(ids, (1, 0), value=-2)[:, cols]  # (B, C): what stands before each key
    query = ids[:, places, None]  # (B, R, 1)
    far = (places[:, None] - keys).abs() >= WINDOW  # (R, C)
    same = ((ids[:, None, cols] == query) | (before[:, None] == query)) & far & batch.real[:, places, None]  # (B, R, C)
    same = same & (keys > batch.first[:, None, None])
    if sight.seen.shape[1] == 1:
        same = same & sight.allowed()[:, 0]
    example, row, column = same.nonzero(as_tuple=True)
    return Pairs(example, row, column, same.sum(-1)[:, None])


def _empty(seen: Seen, inputs: Tensor, every: int) -> Full:
    (B, H, T, _), S, device = seen.q.shape, seen.k.shape[2], inputs.device
    n = count_rows(T, every)
    ahead = looks_ahead(seen.terms, T, S, device)
    new, later = inputs.new_zeros, torch.empty(0, device=device)
    return Full(
        places=later, counted=later, ahead=ahead, visible=later, classes=later, sees_first=later, repeats=later,
        total=new(B, H, n), energy=new(B, H, n), features=new(B, H, n, inputs.shape[-1]), square=new(B, H, n),
        near=new(B, H, n, 2 * WINDOW - 1 if ahead else WINDOW), top=new(B, H, n),
        beyond=new(B, H, n) if ahead else None,
        far=new(B, H, n, len(EDGES)), last=torch.full((n,), -1, device=device), repeated=new(2, B, H, n),
    )  # fmt: skip


def looks_ahead(terms: Terms, T: int, S: int, device: torch.device) -> bool:
    """Whether any row sees a key that comes after it. What is causal by its make is known without reading a mask."""
    past = S - T
    if all(terms.keys(range(i, i + 1), T, S).stop <= i + past + 1 for i in {0, T // 2}):
        return False
    return any(sight.ahead for sight in sights(terms, T, S, device))


def _add_top(block: Block, ordinary: Tensor, out: Tensor) -> None:
    """The largest e at an ordinary key, into (B, h, R); `ordinary` (B, C). Where special tokens are none, or stand around the
    text, nothing has to be hidden."""
    columns = ordinary.any(0).nonzero()[:, 0]
    if not len(columns):
        out.zero_()
        return
    inner = slice(int(columns[0]), int(columns[-1]) + 1)
    if inner == slice(0, ordinary.shape[1]) and bool(ordinary.all()):
        out.fill_(1.0)  # the largest of all
    elif bool(ordinary[:, inner].all()):
        torch.amax(block.e[..., inner], -1, out=out)
    else:
        shown = torch.mul(block.e, ordinary[:, None, None].to(block.e), out=block.scratch)
        torch.amax(shown, -1, out=out)


def _add_bins(block: Block, ahead: bool, out: Tensor, last: Tensor) -> None:
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


def _add_beyond(block: Block, out: Tensor) -> None:
    """How far ahead rows look, into (B, h, R)."""
    start = block.rows.start + block.past  # what stands before the first query is ahead of none
    cols = slice(max(0, start - block.cols.start), None)
    keys = torch.arange(block.cols.start, block.cols.stop, device=out.device)[cols]
    queries = torch.arange(len(block.rows), device=out.device)[:, None] + start
    steps = (keys - queries).clamp(min=0).to(block.e)  # (R, C')
    torch.sum(torch.mul(block.e[..., cols], steps, out=block.scratch[..., cols]), -1, out=out)


def _add_repeated(block: Block, pairs: Pairs, norms: Tensor, out: Tensor) -> None:
    """The weight on repeated tokens, and what it fetches, into (2, B, h, R)."""
    b, r, c = pairs.example, pairs.row, pairs.column
    if not len(b):
        return
    picked = block.e[b, :, r, c]  # (pairs, h)
    both = torch.stack((picked, picked * norms[:, block.heads][b, :, c + block.cols.start]), 1)
    out.permute(1, 3, 0, 2).index_put_((b, r), both, accumulate=True)
