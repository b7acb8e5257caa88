"""Errors of the package. A message names the argument or file, the problem, the value received and the next step."""

from collections.abc import Iterable
from difflib import get_close_matches


class HeadwiseError(ValueError):
    """Base class of all errors that the caller can correct."""


class ArgumentError(HeadwiseError):
    """An argument or option has a value that the call cannot use."""


class FileFormatError(HeadwiseError):
    """A file is missing, damaged, of another format version, or of another kind than its name says."""


class UnsupportedModelError(HeadwiseError):
    """The model has a part that the operation does not support."""


class MissingDependencyError(HeadwiseError):
    """An optional package is not installed or has an unsupported version."""


def suggest_names(name: str, valid_names: Iterable[str]) -> str:
    """Turn a mistyped name into advice: the closest valid names, or all of them.

    >>> suggest_names("gpt-2", ["gpt2", "bert-base"])
    'did you mean gpt2?'
    >>> suggest_names("zzz", ["gpt2", "bert-base"])
    'known: bert-base, gpt2.'
    """
    valid_names = sorted(valid_names)
    matches = get_close_matches(str(name), valid_names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(matches)}?" if matches else f"known: {', '.join(valid_names)}."
