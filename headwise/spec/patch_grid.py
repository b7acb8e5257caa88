"""How the tokens of a picture lie: which of them is which patch, and which stand for no patch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from headwise.errors import HeadwiseError

Kind = Literal["patch", "class", "register", "other"]
MARKS = {"class": "[CLS]", "register": "[REG]", "other": "[TOKEN]"}


@dataclass(frozen=True)
class Grid:
    """Patches in rows and columns, counted from 0 at the upper left; and where each stands among the tokens.

    >>> grid = Grid.of(2, 3, ["class"])
    >>> grid.names
    ('[CLS]', '0,0', '0,1', '0,2', '1,0', '1,1', '1,2')
    >>> grid.find((1, 2)), grid.find("[CLS]")
    (6, 0)
    """

    rows: int
    columns: int
    cells: tuple[int, ...]  # for each token its patch, row by row; -1: none
    kinds: tuple[Kind, ...]

    @staticmethod
    def of(rows: int, columns: int, before: Sequence[Kind] = ()) -> "Grid":
        """All patches in their order, behind some tokens that are none."""
        patches = rows * columns
        inside: list[Kind] = ["patch"] * patches
        return Grid(rows, columns, (*[-1] * len(before), *range(patches)), (*before, *inside))

    def __len__(self) -> int:
        return len(self.cells)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What each token is called: `row,column`, or what it is."""
        many = {kind: self.kinds.count(kind) > 1 for kind in MARKS}
        met: dict[str, int] = {}
        made = []
        for cell, kind in zip(self.cells, self.kinds, strict=True):
            if cell >= 0:
                made.append(f"{cell // self.columns},{cell % self.columns}")
                continue
            met[kind] = met.get(kind, 0) + 1
            made.append(f"{MARKS[kind][:-1]}{met[kind]}]" if many[kind] else MARKS[kind])
        return tuple(made)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The token of each patch, row by row."""
        there = {cell: token for token, cell in enumerate(self.cells) if cell >= 0}
        return tuple(there[cell] for cell in range(self.rows * self.columns))

    def find(self, which: str | int | tuple[int, int]) -> int:
        """A token by its name, by its number, or by the row and column of its patch."""
        if isinstance(which, tuple):
            row, column = which
            if not (0 <= row < self.rows and 0 <= column < self.columns):
                raise HeadwiseError(f"there is no patch {row},{column}; there are {self.rows} rows of {self.columns}.")
            return self.places[row * self.columns + column]
        if isinstance(which, int):
            if not -len(self) <= which < len(self):
                raise HeadwiseError(f"there is no token {which}; there are {len(self)}.")
            return which % len(self)
        if which not in self.names:
            others = [name for name, cell in zip(self.names, self.cells, strict=True) if cell < 0]
            besides = f", and {', '.join(others)}" if others else ""
            raise HeadwiseError(
                f"there is no patch {which!r}; write row,column, from 0,0 to {self.rows - 1},{self.columns - 1}{besides}."
            )
        return self.names.index(which)
