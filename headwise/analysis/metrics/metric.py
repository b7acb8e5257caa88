"""What a measure is: numbers of every head, each a mean over rows of attention; and the two kinds that anyone can make.

A measure says how its numbers are called and told, which marks over the keys it needs, what it takes from rows. Beside a
number stand its null (what a head that looks at nothing in particular would have, over the same rows) and its valued twin
(the same with attention weighted by the length of what it fetches). What rows give is summed, so halves of a corpus add up.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.analysis.recording.batching import Batch, Unit
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.analysis.metrics.attention_call import Call
    from headwise.analysis.metrics.row_blocks import RowBlock
    from headwise.analysis.metrics.row_stats import Rows

# How two become one: sums add up; both are the same, for they do not come from the corpus; the larger sample stays.
ADD, ALIKE, LARGER = "add", "alike", "larger"


@dataclass(frozen=True)
class Target:
    """What a row should look at: what is shown as a hit or a miss of a role. Plain data, so that files can hold it."""

    kind: str  # one of KINDS
    value: int | str = 0

    # so many tokens back; up to so many away, itself left out; so many away or more; at marked keys; at the key a rule names;
    # at the n-th of the places in repeated tokens; at what a prompt of the number of this name asks for; at the word an arc
    # leads to
    KINDS = ("offset", "within", "beyond", "marked", "aim", "echo", "prompt", "arc")


@dataclass(frozen=True)
class Number:
    """One number of every head: what it is called and told as. Its name is unique, in tables, files and on the page."""

    name: str
    label: str = ""  # in a few words
    unit: str = "share"
    more: str = ""  # what more of it means
    hue: int | None = None  # of its colour in pictures, in degrees
    null: str = ""  # the name of the number that is its baseline, over the same rows
    valued: str = ""  # and of its twin weighted by what is fetched
    shown: bool = True  # a null or a twin stands beside another, and is not shown by itself
    placed: bool = False  # told by distances, of which there are none between two texts
    series: str = ""  # the picture or table of their own it belongs to, among many; such are not listed one by one
    column: bool = False  # it has a column in the table of heads
    merge: str = ADD
    on: str = ""  # in words, the texts it is measured on, where they are not the corpus
    target: Target | None = None
    hits: bool = False  # the share of rows whose largest weight is on the target, not the weight on it

    def three(self, null: str = "", valued: str = "") -> tuple["Number", "Number", "Number"]:
        """Itself with its null and its valued twin.

        >>> [number.name for number in Number("digit").three()]
        ['digit', 'digit null', 'digit valued']
        """
        score = replace(self, null=null or f"{self.name} null", valued=valued or f"{self.name} valued")
        beside = replace(self, shown=False, column=False, label="", more="", target=None)
        return score, replace(beside, name=score.null), replace(beside, name=score.valued)


@dataclass(frozen=True, eq=False)
class Column:
    """Marks over the keys, by name: a row's weight on each is summed, with the weight on all. Mostly 0 and 1.

    The first token of a text has none, unless `first`: a head that rests there would seem to look for what is marked.
    """

    name: str
    marks: (
        Callable[[Unit], Sequence[float]] | Tensor
    )  # one for each token of a text; or for each entry of the vocabulary
    first: bool = False

    def over(self, batch: Batch) -> Tensor:
        """The marks of a batch, (B, S)."""
        if isinstance(self.marks, Tensor):
            made = self.marks.to(batch.ids.device)[batch.ids]
        else:
            made = _spread(self.name, self.marks, batch, 0.0)
        made = made.float() * batch.real
        if not self.first:
            made = made.scatter(1, batch.first[:, None], 0.0)
        return made


@dataclass(frozen=True, eq=False)
class Aim:
    """One key for each row of a text, by a rule; below 0 where a row has none. The first token is no target."""

    name: str
    places: Callable[[Unit], Sequence[int]]
    hits: bool = False  # whether the largest weight is there is asked too

    def over(self, batch: Batch) -> Tensor:
        """Where the rows of a batch should look, (B, T), by columns of the batch; -1: nowhere."""
        made = _spread(self.name, self.places, batch, -1.0).long()
        lengths = batch.real.sum(1)[:, None]
        if bool((made >= lengths).any()):
            raise HeadwiseError(
                f"{self.name!r} aims at a token behind the end of its text; give its place in the text."
            )
        return torch.where((made > 0) & batch.real, made + batch.first[:, None], -1)


class Taker(ABC):
    """What a measure of blocks takes from one call at one site."""

    @abstractmethod
    def see(self, block: "RowBlock") -> None:
        """One block of rows, as it goes by."""

    @abstractmethod
    def take(self) -> tuple[Tensor, Tensor] | None:
        """Sums and counts, as `Measure.take` gives them, when all blocks were seen; None: nothing is counted."""


class Measure:
    """Numbers of every head. Make one by `WeightOn` or `WeightAt`, or give `numbers` and either `take`, from rows, or `at`,
    from blocks of rows. One without numbers keeps something else, such as examples."""

    numbers: tuple[Number, ...] = ()
    columns: tuple[Column, ...] = ()
    aims: tuple[Aim, ...] = ()
    full = False  # it needs a walk over every cell (`Full`), which detail="light" does not make

    @property
    def score(self) -> Number:
        """The first of its numbers: what a role may refer to."""
        return self.numbers[0]

    @property
    def names(self) -> tuple[str, ...]:
        """What its numbers are called."""
        return tuple(number.name for number in self.numbers)

    @property
    def across(self) -> bool:
        """Whether it can be asked of cross-attention, where there are no distances."""
        return not self.numbers or not all(number.placed for number in self.numbers)

    def begin(self, batch: Batch) -> None:
        """A batch that will be read: what does not depend on heads is worked out here."""

    def at(self, call: "Call") -> Taker | None:
        """One call at one site. What it gives is shown every block of rows; None: the measure takes rows, or nothing more."""

    def take(self, rows: "Rows") -> tuple[Tensor, Tensor]:
        """Sums over the rows of one call, (B, H, numbers), and how many rows they are sums over, which broadcast to that."""
        raise NotImplementedError


class WeightOn(Measure):
    """The weight on marked tokens, over the rows that see one. Its null is their share among what is visible.

    `marks` gives a number for each token of a text: 1 for what is looked for, 0 for the rest. It is called with a text as the
    model reads it: `.pieces` (its tokens as a person writes them), `.document` (words and relations, or None), `.alignment`.

    >>> comma = WeightOn("comma", lambda text: [piece == "," for piece in text.pieces])
    >>> comma.names
    ('comma', 'comma null', 'comma valued')
    """

    def __init__(
        self,
        name: str,
        marks: Callable[[Unit], Sequence[float]] | Tensor,
        *,
        label: str = "",
        more: str = "",
        hue: int | None = None,
        column: bool = True,
        everywhere: bool = False,
    ) -> None:
        self.everywhere = everywhere  # all rows count, and the first token may be marked: where a head rests
        self.columns = (Column(name, marks, everywhere),)
        told = Number(
            name, label or f"weight on {name}", more=more, hue=hue, column=column, target=Target("marked", name)
        )
        self.numbers = told.three()

    def take(self, rows: "Rows") -> tuple[Tensor, Tensor]:
        """The weight, a uniform head's, and the weight of what is fetched."""
        (column,) = self.columns
        weight, counted = rows.part(column.name), rows.counted.to(rows.total)[:, None]  # (B, H, n) (B, 1, n)
        heavy = rows.valued(column.name) / rows.part(rows.NORM).clamp(min=1e-30)
        there = rows.marked(column.name)  # (B, 1 or H, n): keys that are marked, among the visible
        null = (there / rows.visible.to(weight).clamp(min=1) * counted).sum(2).expand(weight.shape[:2])
        asked = counted if self.everywhere else (there > 0) * counted
        return torch.stack((weight.sum(2), null, heavy.sum(2)), -1), asked.sum(2)[..., None]


class WeightAt(Measure):
    """The weight on one token of each row's own, over the rows that have and see it. Its null is one token in all visible.

    `places` gives for each token of a text the place of the one it should look at; -1: none. `hits`: not the weight but
    whether it is the largest of the row; of equals each gets its share. `everywhere`: rows that have such a token and do not
    see it count too.

    >>> WeightAt("back two", lambda text: [row - 2 for row in range(len(text.ids))]).numbers[0].unit
    'share'
    """

    def __init__(
        self,
        name: str,
        places: Callable[[Unit], Sequence[int]],
        *,
        label: str = "",
        more: str = "",
        hue: int | None = None,
        hits: bool = False,
        everywhere: bool = False,
        merge: str = ADD,
        on: str = "",
    ) -> None:
        self.everywhere = everywhere
        self.aims, self.full = (Aim(name, places, hits),), hits
        label = label or (f"largest weight on {name}" if hits else f"weight on {name}")
        told = Number(
            name, label, more=more, hue=hue, placed=True, column=True, merge=merge, on=on, target=Target("aim", name),
            hits=hits,
        )  # fmt: skip
        self.numbers = told.three()

    def take(self, rows: "Rows") -> tuple[Tensor, Tensor]:
        """The weight, a uniform head's, and the weight of what is fetched."""
        (aim,) = self.aims
        there = (rows.has(aim.name) if self.everywhere else rows.sees[aim.name]) & rows.counted[
            :, None
        ]  # (B, 1 or H, n)
        null = (there / rows.visible.to(rows.total).clamp(min=1)).sum(2)
        weight, heavy = rows.hits[aim.name] if aim.hits else rows.at(aim.name)  # (B, H, n)
        sums = [(one * there).sum(2) for one in (weight, heavy)]
        return torch.stack((sums[0], null.expand_as(sums[0]), sums[1]), -1), there.sum(2)[..., None]


def _spread(name: str, given: Callable[[Unit], Sequence[float]], batch: Batch, empty: float) -> Tensor:
    """What a function of a text gives for each of its tokens, as (B, S), padding left out."""
    made = torch.full(batch.ids.shape, empty)
    for row, (unit, first) in enumerate(zip(batch.units, batch.first.tolist(), strict=True)):
        values = torch.as_tensor(given(unit), dtype=torch.float32)
        if values.shape != (len(unit.ids),):
            raise HeadwiseError(
                f"{name!r} gave {tuple(values.shape)} numbers for a text of {len(unit.ids)} tokens; give one for each token."
            )
        made[row, first : first + len(values)] = values
    return made.to(batch.ids.device)
