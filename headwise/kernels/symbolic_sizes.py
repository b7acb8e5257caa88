"""Sizes that may be symbols: a model that is being traced has no numbers for them yet."""

from typing import Any, NamedTuple


class Span(NamedTuple):
    """From `start` to before `stop`, as a range says it, where these are symbols of a model that is being traced."""

    start: Any
    stop: Any


def whole(length: int) -> range:
    """All rows, or all keys; a range holds no symbols."""
    return range(length) if isinstance(length, int) else Span(0, length)  # pyright: ignore[reportReturnType]


def known(fact: bool) -> bool:
    """Whether it is so; of sizes that are symbols, whether it is so for all of them."""
    if isinstance(fact, bool):
        return fact
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(fact)
