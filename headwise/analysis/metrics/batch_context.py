"""What all layers that read a batch have in common, worked out once: marks over the keys, aims, who may see what."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.metrics.metric import Aim, Column, Measure
from headwise.analysis.metrics.row_blocks import KeptSights, Sight, pieces, sights
from headwise.analysis.recording.batching import Batch
from headwise.errors import HeadwiseError
from headwise.kernels import Mask
from headwise.kernels.score_params import Terms

WINDOW = 32  # offsets kept one by one: 0 … 31 back, and as many ahead; what lies beyond is long range
# Columns that are always there: 1 for every key, its place in the text, whether it is the first; and the length of its write.
ALL, PLACE, FIRST, NORM = "all", "place", "first", "norm"
PAIRS = 1 << 20  # repeated tokens that are kept from layer to layer; more are found again
SPECIAL = "special"  # the column of special tokens, which are neither confident nor meant to be looked at

RowKey = tuple[Mask | None, range, int]  # some rows of any layer that sees as much


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of some rows whatever the weights are."""

    places: Tensor  # (R,)
    visible: Tensor  # (1 or B, 1 or H, R)
    marked: Tensor  # (B, 1 or H, R, c): marks among what is visible
    sees_first: Tensor  # (B, 1 or H, R)
    sees: dict[str, Tensor]  # (B, 1 or H, R) for each aim: whether there is something, and it is seen


@dataclass(frozen=True, eq=False)
class FarRepeats:
    """Far keys that repeat the token of a row, or follow one that does."""

    example: Tensor  # (pairs,)
    row: Tensor  # (pairs,): of the block
    column: Tensor  # (pairs,)
    repeats: Tensor  # (B, 1, R): how many a row has


@dataclass(frozen=True, eq=False)
class ColumnLayout:
    """Which columns are summed over the keys, by name: the usual ones, marks, what each key writes, and marks times that."""

    columns: tuple[Column, ...]
    aims: tuple[Aim, ...]

    @staticmethod
    def of(measures: Iterable[Measure]) -> "ColumnLayout":
        """Whatever some measures need."""
        measures = list(measures)
        made = ColumnLayout(
            tuple(column for measure in measures for column in measure.columns),
            tuple(aim for measure in measures for aim in measure.aims),
        )
        for what, names in (("marks", made.marks), ("aims", [aim.name for aim in made.aims])):
            twice = {name for name in names if list(names).count(name) > 1}
            if twice or {ALL, PLACE, FIRST, NORM} & {*names}:
                raise HeadwiseError(f"two {what} have the name {sorted(twice or names)[0]!r}; give each its own.")
        return made

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """The names of the marks."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def place(self) -> dict[str, int]:
        """Where each column stands."""
        return {name: place for place, name in enumerate((ALL, PLACE, FIRST, *self.marks, NORM))}

    @cached_property
    def valued(self) -> dict[str, int]:
        """Where each mark times the length of what its key writes stands."""
        return {name: len(self.place) + place for place, name in enumerate(self.marks)}


@dataclass(eq=False)
class Scene:
    """One batch, and what follows from it for measures."""

    batch: Batch
    layout: ColumnLayout
    seen: KeptSights = field(default_factory=KeptSights)
    _known: dict[RowKey, Known] = field(default_factory=dict)
    _pairs: dict[RowKey, FarRepeats] = field(default_factory=dict)
    _paired: int = 0  # how many of them are kept
    _targets: dict[tuple[bool, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def marks(self) -> Tensor:
        """Marks of the keys, (B, S, c)."""
        made = [column.over(self.batch) for column in self.layout.columns]
        empty = torch.zeros(*self.batch.ids.shape, 0, device=self.batch.ids.device)
        return torch.stack(made, -1) if made else empty

    @cached_property
    def aims(self) -> dict[str, Tensor]:
        """Where each row should look, (B, S) for each aim; -1: nowhere."""
        return {aim.name: aim.over(self.batch) for aim in self.layout.aims}

    @cached_property
    def ordinary(self) -> Tensor:
        """Tokens that are no special ones, (B, S)."""
        names = self.layout.marks
        special = self.marks[..., names.index(SPECIAL)] if SPECIAL in names else torch.zeros_like(self.batch.real)
        return (special == 0) & self.batch.real

    @cached_property
    def inner(self) -> range | None:
        """The columns between special tokens that stand around every text, or all of them; None where some stand within.
        Padding may be among them: nobody sees it."""
        special = ~self.ordinary & self.batch.real  # (B, S)
        columns = (~special.any(0)).nonzero()[:, 0].tolist() or [0, -1]
        between = range(columns[0], columns[-1] + 1)
        return None if bool(special[:, between.start : between.stop].any()) else between

    def inputs(self, norms: Tensor) -> Tensor:
        """All columns, (B, H, S, f), where each key would write so much, (B, H, S)."""
        place = torch.arange(norms.shape[2], device=norms.device) - self.batch.first[:, None]  # (B, S)
        usual = torch.stack((torch.ones_like(place), place, place == 0), -1)
        common = torch.cat((usual.to(norms), self.marks.to(norms)), -1)[:, None].expand(-1, norms.shape[1], -1, -1)
        return torch.cat((common, norms[..., None], self.marks[:, None] * norms[..., None]), -1)

    def sights(self, terms: Terms, T: int, S: int, every: int = 1) -> Iterator[Sight]:
        """What the rows of a call may see, block by block."""
        return sights(terms, T, S, self.batch.ids.device, every, self.seen)

    def about(self, terms: Terms, T: int, S: int, every: int = 1) -> dict[str, Any]:
        """What is known of all rows of a call, whatever the weights are. Ask before a walk, not block by block: each block
        needs more room than the last one left, and what is kept would lie in between. Such holes grow with the square of
        a text."""
        known = [self._known_of(sight) for sight in self.sights(terms, T, S, every)]
        places = torch.cat([one.places for one in known])  # (n,)

        def joined(parts: list[Tensor]) -> Tensor:
            most = [max(part.shape[axis] for part in parts) for axis in (0, 1)]
            return torch.cat([part.expand(*most, *part.shape[2:]) for part in parts], 2)

        return {
            "places": places, "counted": self.batch.real[:, places], "visible": joined([one.visible for one in known]),
            "marks": joined([one.marked for one in known]), "sees_first": joined([one.sees_first for one in known]),
            "sees": {name: joined([one.sees[name] for one in known]) for name in known[0].sees},
        }  # fmt: skip

    def _known_of(self, sight: Sight) -> Known:
        key = (sight.mask, sight.rows, sight.past)
        if key not in self._known:
            self._known[key] = self._know(sight)
        return self._known[key]

    def pairs(self, sight: Sight) -> FarRepeats:
        """Which far keys repeat tokens. Their number grows with the square of a text, so only so many are kept for the next
        layer."""
        key = (sight.mask, sight.rows, sight.past)
        if key in self._pairs:
            return self._pairs[key]
        made = _pairs(sight, self.batch)
        if self._paired + len(made.row) <= PAIRS:
            self._pairs[key] = made
            self._paired += len(made.row)
        return made

    def targets(self, places: Tensor, counted: Tensor, offsets: Sequence[int], ahead: bool) -> tuple[Tensor, Tensor]:
        """Which offsets of each row lead to a token, and which of those not to the first: (B, n, o) of 0 and 1."""
        key = (ahead, len(places), int(places[-1]) if len(places) else 0)
        if key not in self._targets:
            S, real = self.batch.real.shape[1], self.batch.real
            target = places[:, None] - torch.tensor(offsets, device=places.device)  # (n, o)
            first = self.batch.first[:, None, None]
            inside = (target >= first) & (target < S) & real[:, target.clamp(0, S - 1)] & counted[..., None]
            self._targets[key] = inside.float(), (inside & (target > first)).float()
        return self._targets[key]

    def _know(self, sight: Sight) -> Known:
        device = self.batch.ids.device
        places = torch.arange(sight.rows.start, sight.rows.stop, device=device) + sight.past  # (R,)
        marked = sight.sums(self.marks)  # (B, 1 or H, R, c)
        sees = {name: sight.sees(aimed[:, places]) for name, aimed in self.aims.items()}
        return Known(places, sight.visible, marked, sight.sees(self.batch.first[:, None]).to(marked), sees)


def _pairs(sight: Sight, batch: Batch) -> FarRepeats:
    device, start = batch.ids.device, sight.cols.start
    places = torch.arange(sight.rows.start, sight.rows.stop, device=device) + sight.past  # (R,)
    ids = batch.ids.masked_fill(~batch.real, -1)
    before = torch.nn.functional.pad(ids, (1, 0), value=-2)  # (B, S + 1): what stands before each key
    query = ids[:, places, None]  # (B, R, 1)
    found, repeats = [], torch.zeros(len(ids), len(places), dtype=torch.long, device=device)
    for some in pieces(sight.cols):
        cols = slice(some.start, some.stop)
        keys = torch.arange(some.start, some.stop, device=device)  # (c,)
        far = (places[:, None] - keys).abs() >= WINDOW  # (R, c)
        same = ((ids[:, None, cols] == query) | (before[:, None, cols] == query)) & far  # (B, R, c)
        same = same & batch.real[:, places, None] & (keys > batch.first[:, None, None])
        if sight.seen.shape[1] == 1:
            same = same & sight.allowed(slice(some.start - start, some.stop - start))[:, 0]
        found.append(same.nonzero() + torch.tensor([0, 0, some.start - start], device=device))  # (pairs, 3)
        repeats += same.sum(-1)
    example, row, column = torch.cat(found).unbind(1)
    return FarRepeats(example, row, column, repeats[:, None])
