"""Calls of a model with arbitrary arguments, in place of texts."""

from collections.abc import Mapping
from typing import Any

from headwise.errors import ArgumentError


def reads_calls(model: object) -> bool:
    """Return whether the corpus of a model is a list of calls, as that of an attached torch module."""
    return bool(getattr(model, "has_own_calls", False))


def is_call_list(corpus: Any) -> bool:
    """Return whether `corpus` is a dict of keyword arguments or a list of them."""
    items = list(corpus) if isinstance(corpus, list | tuple) else [corpus]
    return bool(items) and all(isinstance(item, Mapping) for item in items)


def normalize_call_list(model: object, corpus: Any) -> list[Any]:
    """Return the calls of a corpus: a list of calls, or one dict of keyword arguments."""
    is_list = isinstance(corpus, list) or (isinstance(corpus, tuple) and not reads_calls(model))
    calls = [corpus] if isinstance(corpus, Mapping) else list(corpus) if is_list else None
    if not calls:
        got = "an empty list" if is_list else type(corpus).__name__
        raise ArgumentError(
            f"corpus: {type(getattr(model, 'model', model)).__name__} needs a list of calls. Got {got}. Each call is a dict "
            f"of keyword arguments, a tuple of arguments, or an argument of the forward= of hw.attach."
        )
    return calls


def run_call(model: Any, call: Any) -> Any:
    """Run one call and return the output of the model."""
    return model.run_call(call) if reads_calls(model) else model(**call)
