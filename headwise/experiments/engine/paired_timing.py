"""Timing on a noisy machine: interleaved runs, reported as a ratio with its confidence interval."""

import gc
import time
from collections.abc import Callable, Mapping

from headwise.errors import ArgumentError
from headwise.experiments.engine.statistic import Statistic


def interleaved_timing(
    functions: Mapping[str, Callable[[], object]], baseline: str, rounds: int = 15, min_seconds: float = 0.02
) -> dict[str, Statistic]:
    """Return the time of each function relative to the baseline: the median over rounds, with its interval.

    Args:
        functions: Functions to time, by name.
        baseline: Name of the function that the others are compared with.
        rounds: Number of rounds. Each function runs once per round, in rotating order.
        min_seconds: Short functions are repeated until one round takes at least this long.
    """
    if baseline not in functions:
        raise ArgumentError(f"baseline={baseline!r} is not a timed function. Use one of {', '.join(functions)}.")
    names = list(functions)
    repeats = {name: _num_repeats(functions[name], min_seconds) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        for round_index in range(rounds):
            shift = round_index % len(names)
            for name in names[shift:] + names[:shift]:
                start = time.perf_counter()
                for _ in range(repeats[name]):
                    functions[name]()
                seconds[name].append((time.perf_counter() - start) / repeats[name])
    finally:
        if gc_was_enabled:
            gc.enable()
    return {name: _ratio(seconds[name], seconds[baseline]) for name in names}


def _num_repeats(function: Callable[[], object], min_seconds: float) -> int:
    function()  # warm up
    start = time.perf_counter()
    function()
    return max(1, round(min_seconds / max(1e-9, time.perf_counter() - start)))


def _ratio(seconds: list[float], baseline: list[float]) -> Statistic:
    return Statistic.median_of([value / reference for value, reference in zip(seconds, baseline, strict=True)])
