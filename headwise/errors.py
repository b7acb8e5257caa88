"""One error class. A message says what is wrong, what was got, and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class HeadwiseError(ValueError):
    """Raised for anything a caller can put right."""


def close_names(name: str, known: Iterable[str]) -> str:
    """Turn a mistyped name into advice: the close ones, or all of them.

    >>> close_names("gpt-2", ["gpt2", "bert-base"])
    'did you mean gpt2?'
    >>> close_names("zzz", ["gpt2", "bert-base"])
    'known: bert-base, gpt2.'
    """
    known = sorted(known)
    close = get_close_matches(str(name), known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}."
