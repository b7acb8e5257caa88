"""Sizes that may be symbolic, because a model is being traced."""

from typing import Any, NamedTuple


class SymbolicIndexRange(NamedTuple):
    """A range whose `start` and `stop` are symbolic sizes, which a Python `range` cannot contain."""

    start: Any
    stop: Any


def full_range(length: int) -> range:
    """Return a range over all rows or keys, symbolic if the length is."""
    return range(length) if isinstance(length, int) else SymbolicIndexRange(0, length)  # pyright: ignore[reportReturnType]


def statically_true(condition: bool) -> bool:
    """Return a condition. A condition on symbolic sizes is True only if it is true for all values of the sizes."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)
