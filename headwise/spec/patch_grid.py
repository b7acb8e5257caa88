"""Layout of the tokens of an image: the patch of each token, and tokens without a patch such as [CLS]."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from headwise.errors import ArgumentError

TokenKind = Literal["patch", "class", "register", "other"]
TOKEN_LABELS = {"class": "[CLS]", "register": "[REG]", "other": "[TOKEN]"}


@dataclass(frozen=True)
class PatchGrid:
    """Patches of an image in rows and columns, counted from 0 at the upper left, and the token of each patch.

    Attributes:
        rows: Number of rows of patches.
        columns: Number of columns of patches.
        patch_of_token: Patch index of each token in row-major order, or -1 for tokens without a patch.
        kinds: Kind of each token: "patch", "class", "register" or "other".

    >>> grid = PatchGrid.of(2, 3, ["class"])
    >>> grid.token_names
    ('[CLS]', '0,0', '0,1', '0,2', '1,0', '1,1', '1,2')
    >>> grid.token_index((1, 2)), grid.token_index("[CLS]")
    (6, 0)
    """

    rows: int
    columns: int
    patch_of_token: tuple[int, ...]
    kinds: tuple[TokenKind, ...]

    @staticmethod
    def of(rows: int, columns: int, prefix_kinds: Sequence[TokenKind] = ()) -> "PatchGrid":
        """Create a grid of patches in row-major order after some tokens without a patch.

        Args:
            rows: Number of rows of patches.
            columns: Number of columns of patches.
            prefix_kinds: Kinds of the tokens before the patches.
        """
        patches = rows * columns
        patch_kinds: list[TokenKind] = ["patch"] * patches
        return PatchGrid(rows, columns, (*[-1] * len(prefix_kinds), *range(patches)), (*prefix_kinds, *patch_kinds))

    def __len__(self) -> int:
        return len(self.patch_of_token)

    @cached_property
    def token_names(self) -> tuple[str, ...]:
        """Name of each token: `row,column` of its patch, or its kind, such as `[CLS]`."""
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
        """Token index of each patch in row-major order."""
        tokens_by_patch = {patch: token for token, patch in enumerate(self.patch_of_token) if patch >= 0}
        return tuple(tokens_by_patch[patch] for patch in range(self.rows * self.columns))

    def token_index(self, token: str | int | tuple[int, int]) -> int:
        """Return the index of a token.

        Args:
            token: Name of the token, its index (negative indices count from the end), or (row, column) of its patch.

        Raises:
            ArgumentError: The token does not exist.
        """
        if isinstance(token, tuple):
            row, column = token
            if not (0 <= row < self.rows and 0 <= column < self.columns):
                raise ArgumentError(
                    f"patch {row},{column}: does not exist. The grid has {self.rows} rows of {self.columns} patches."
                )
            return self.token_of_patch[row * self.columns + column]
        if isinstance(token, int):
            if not -len(self) <= token < len(self):
                raise ArgumentError(f"token {token}: does not exist. The image has {len(self)} tokens.")
            return token % len(self)
        if token not in self.token_names:
            special_names = [
                name for name, patch in zip(self.token_names, self.patch_of_token, strict=True) if patch < 0
            ]
            special_hint = f", or one of {', '.join(special_names)}" if special_names else ""
            raise ArgumentError(
                f"patch {token!r}: does not exist. Use row,column from 0,0 to "
                f"{self.rows - 1},{self.columns - 1}{special_hint}."
            )
        return self.token_names.index(token)
