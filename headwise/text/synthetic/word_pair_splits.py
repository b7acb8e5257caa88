"""Which words may meet. Every word occurs in both splits; the pairs listed here occur in one of them only.

Pairs: subject and verb, adjective and noun, two people in one document, a bracket and the bracket within it. Not first name
and surname: whoever learns who is never called what is right in training, and must then copy against better knowledge.
"""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

from headwise.errors import HeadwiseError
from headwise.text.synthetic.vocabulary import BRACKETS

Item = TypeVar("Item")
SPLITS = ("train", "held-out")
# Kinds of brackets that training never nests, neither way round: were " in ' held out and ' in " not, whoever learned
# that ' closes first would be right in training and wrong here.
HELD_OUT_NESTINGS = ({0, 3}, {1, 4}, {2, 3})


def check_split(split: str) -> None:
    """Refuse a split that is none."""
    if split not in SPLITS:
        raise HeadwiseError(f"there is no split {split!r}; it is one of {', '.join(SPLITS)}.")


def is_held_out(first: int, second: int, held_out_stride: int = 4) -> bool:
    """Whether two words, by their places in their tables, never meet in training: one pair in so many.

    >>> [second for second in range(12) if is_held_out(0, second)]
    [0, 4, 8]
    """
    return (first + second) % held_out_stride == 0


@cache
def allowed_partners(split: str, first: int, table: Sequence[Item], held_out_stride: int = 4) -> tuple[Item, ...]:
    """Those of a table that a word may meet in this split."""
    held_out = split == "held-out"
    return tuple(item for second, item in enumerate(table) if is_held_out(first, second, held_out_stride) == held_out)


@cache
def allowed_nestings(split: str, outer: int) -> tuple[int, ...]:
    """The kinds of brackets that may stand within the outer kind in this split; never the same within the same.

    >>> allowed_nestings("train", 0), allowed_nestings("held-out", 0)
    ((1, 2, 4), (3,))
    """
    held_out = split == "held-out"
    kinds = (inner for inner in range(len(BRACKETS)) if inner != outer)
    return tuple(inner for inner in kinds if ({outer, inner} in HELD_OUT_NESTINGS) == held_out)
