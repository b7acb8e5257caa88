"""Sizes that may be symbols: a model that is being traced has no numbers for them yet."""

from typing import Any, NamedTuple


class SymbolicIndexRange(NamedTuple):
    """From `start` to before `stop`, as a range says it, where these are symbols of a model that is being traced."""

    start: Any
    stop: Any


def full_range(length: int) -> range:
    """All rows, or all keys; a range holds no symbols."""
    return range(length) if isinstance(length, int) else SymbolicIndexRange(0, length)  # pyright: ignore[reportReturnType]


def statically_true(condition: bool) -> bool:
    """Whether it is so; of sizes that are symbols, whether it is so for all of them."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)
