"""Pairs of words that occur together in each split. Every word occurs in both splits; a pair occurs in only one.

Pairs are subject and verb, adjective and noun, two people in one document, and a bracket inside a bracket. First name and
surname are not paired: a model could learn in training which surnames a person never has, and would be wrong if it copies a
held-out surname.
"""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

from headwise.errors import ArgumentError
from headwise.text.synthetic.vocabulary import BRACKETS

Item = TypeVar("Item")
SPLITS = ("train", "held-out")
# Pairs of brackets that are never nested in training, in either order. If only one order were held out, a model that learned
# the order of closing would be right in training and wrong here.
HELD_OUT_NESTINGS = ({0, 3}, {1, 4}, {2, 3})


def check_split(split: str) -> None:
    """Raise if the split is unknown."""
    if split not in SPLITS:
        raise ArgumentError(f"split: unknown split. Got {split!r}. Use one of {', '.join(SPLITS)}.")


def is_held_out(first: int, second: int, held_out_stride: int = 4) -> bool:
    """Return whether two words, by their indices in their tables, never occur together in training.

    >>> [second for second in range(12) if is_held_out(0, second)]
    [0, 4, 8]
    """
    return (first + second) % held_out_stride == 0


@cache
def allowed_partners(split: str, first: int, table: Sequence[Item], held_out_stride: int = 4) -> tuple[Item, ...]:
    """Return the entries of a table that may occur with a word in this split."""
    held_out = split == "held-out"
    return tuple(item for second, item in enumerate(table) if is_held_out(first, second, held_out_stride) == held_out)


@cache
def allowed_bracket_nestings(split: str, outer: int) -> tuple[int, ...]:
    """Return the kinds of brackets that may be nested inside the outer kind in this split, never the same kind.

    >>> allowed_bracket_nestings("train", 0), allowed_bracket_nestings("held-out", 0)
    ((1, 2, 4), (3,))
    """
    held_out = split == "held-out"
    kinds = (inner for inner in range(len(BRACKETS)) if inner != outer)
    return tuple(inner for inner in kinds if ({outer, inner} in HELD_OUT_NESTINGS) == held_out)
