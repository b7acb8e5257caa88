"""Which words may meet. Every word occurs in both splits; the pairs listed here occur in one of them only.

Pairs: subject and verb, adjective and noun, first name and surname, a bracket and the bracket within it.
"""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

from headwise.errors import HeadwiseError
from headwise.text.little.vocabulary import BRACKETS

Item = TypeVar("Item")
SPLITS = ("train", "held-out")


def check_split(split: str) -> None:
    """Refuse a split that is none."""
    if split not in SPLITS:
        raise HeadwiseError(f"there is no split {split!r}; it is one of {', '.join(SPLITS)}.")


def is_held_out(first: int, second: int) -> bool:
    """Whether two words, by their places in their tables, never meet in training: one pair in four.

    >>> [second for second in range(12) if is_held_out(0, second)]
    [0, 4, 8]
    """
    return (first + second) % 4 == 0


@cache
def partners(split: str, first: int, table: Sequence[Item]) -> tuple[Item, ...]:
    """Those of a table that a word may meet in this split."""
    held_out = split == "held-out"
    return tuple(item for second, item in enumerate(table) if is_held_out(first, second) == held_out)


@cache
def nestings(split: str, outer: int) -> tuple[int, ...]:
    """The kinds of brackets that may stand within the outer kind in this split; never the same within the same.

    >>> nestings("train", 0), nestings("held-out", 0)
    ((1, 2, 3), (4,))
    """
    n = len(BRACKETS)
    inner = range(1, n - 1) if split == "train" else (n - 1,)
    return tuple((outer + step) % n for step in inner)
