"""Time on a noisy machine: contestants take turns, and what is told is a ratio with its interval."""

import gc
import time
from collections.abc import Callable, Mapping

from headwise.errors import HeadwiseError
from headwise.experiments.engine.statistic import Statistic


def interleaved_timing(
    functions: Mapping[str, Callable[[], object]], baseline: str, rounds: int = 15, min_seconds: float = 0.02
) -> dict[str, Statistic]:
    """How many times as long as the base each takes: the median over turns, with its interval.

    Everyone runs once a turn, in an order that rotates; short calls are repeated until a turn takes `min_seconds` seconds.
    """
    if baseline not in functions:
        raise HeadwiseError(f"the base {baseline!r} is none of {', '.join(functions)}.")
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
