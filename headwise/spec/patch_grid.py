"""How the tokens of a picture lie: which of them is which patch, and which stand for no patch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from headwise.errors import HeadwiseError

TokenKind = Literal["patch", "class", "register", "other"]
TOKEN_LABELS = {"class": "[CLS]", "register": "[REG]", "other": "[TOKEN]"}


@dataclass(frozen=True)
class PatchGrid:
    """Patches in rows and columns, counted from 0 at the upper left; and where each stands among the tokens.

    >>> grid = PatchGrid.of(2, 3, ["class"])
    >>> grid.token_names
    ('[CLS]', '0,0', '0,1', '0,2', '1,0', '1,1', '1,2')
    >>> grid.token_index((1, 2)), grid.token_index("[CLS]")
    (6, 0)
    """

    rows: int
    columns: int
    patch_of_token: tuple[int, ...]  # for each token its patch, row by row; -1: none
    kinds: tuple[TokenKind, ...]

    @staticmethod
    def of(rows: int, columns: int, prefix_kinds: Sequence[TokenKind] = ()) -> "PatchGrid":
        """All patches in their order, behind some tokens that are none."""
        patches = rows * columns
        patch_kinds: list[TokenKind] = ["patch"] * patches
        return PatchGrid(rows, columns, (*[-1] * len(prefix_kinds), *range(patches)), (*prefix_kinds, *patch_kinds))

    def __len__(self) -> int:
        return len(self.patch_of_token)

    @cached_property
    def token_names(self) -> tuple[str, ...]:
        """What each token is called: `row,column`, or what it is."""
        is_repeated = {kind: self.kinds.count(kind) > 1 for kind in TOKEN_LABELS}
        counts: dict[str, int] = {}
        labels = []
        for patch, kind in zip(self.patch_of_token, self.kinds, strict=True):
            if patch >= 0:
                labels.append(f"{patch // self.columns},{patch % self.columns}")
                continue
            counts[kind] = counts.get(kind, 0) + 1
            labels.append(f"{TOKEN_LABELS[kind][:-1]}{counts[kind]}]" if is_repeated[kind] else TOKEN_LABELS[kind])
        return tuple(labels)

    @cached_property
    def token_of_patch(self) -> tuple[int, ...]:
        """The token of each patch, row by row."""
        tokens_by_patch = {patch: token for token, patch in enumerate(self.patch_of_token) if patch >= 0}
        return tuple(tokens_by_patch[patch] for patch in range(self.rows * self.columns))

    def token_index(self, token: str | int | tuple[int, int]) -> int:
        """A token by its name, by its number, or by the row and column of its patch."""
        if isinstance(token, tuple):
            row, column = token
            if not (0 <= row < self.rows and 0 <= column < self.columns):
                raise HeadwiseError(f"there is no patch {row},{column}; there are {self.rows} rows of {self.columns}.")
            return self.token_of_patch[row * self.columns + column]
        if isinstance(token, int):
            if not -len(self) <= token < len(self):
                raise HeadwiseError(f"there is no token {token}; there are {len(self)}.")
            return token % len(self)
        if token not in self.token_names:
            special_names = [
                name for name, patch in zip(self.token_names, self.patch_of_token, strict=True) if patch < 0
            ]
            special_hint = f", and {', '.join(special_names)}" if special_names else ""
            raise HeadwiseError(
                f"there is no patch {token!r}; write row,column, from 0,0 to "
                f"{self.rows - 1},{self.columns - 1}{special_hint}."
            )
        return self.token_names.index(token)
