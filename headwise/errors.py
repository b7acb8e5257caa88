"""One error class. A message says what is wrong, what was got, and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class HeadwiseError(ValueError):
    """Raised for anything a caller can put right."""


def suggest_names(name: str, valid_names: Iterable[str]) -> str:
    """Turn a mistyped name into advice: the close ones, or all of them.

    >>> suggest_names("gpt-2", ["gpt2", "bert-base"])
    'did you mean gpt2?'
    >>> suggest_names("zzz", ["gpt2", "bert-base"])
    'known: bert-base, gpt2.'
    """
    valid_names = sorted(valid_names)
    matches = get_close_matches(str(name), valid_names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(matches)}?" if matches else f"known: {', '.join(valid_names)}."
