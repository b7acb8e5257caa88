"""Time on a noisy machine: contestants take turns, and what is told is a ratio with its interval."""

import gc
import time
from collections.abc import Callable, Mapping

from headwise.errors import HeadwiseError
from headwise.experiments.engine.statistic import Figure


def race(
    contestants: Mapping[str, Callable[[], object]], base: str, turns: int = 15, least: float = 0.02
) -> dict[str, Figure]:
    """How many times as long as the base each takes: the median over turns, with its interval.

    Everyone runs once a turn, in an order that rotates; short calls are repeated until a turn takes `least` seconds.
    """
    if base not in contestants:
        raise HeadwiseError(f"the base {base!r} is none of {', '.join(contestants)}.")
    names = list(contestants)
    times = {name: _repeats(contestants[name], least) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        for turn in range(turns):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                start = time.perf_counter()
                for _ in range(times[name]):
                    contestants[name]()
                seconds[name].append((time.perf_counter() - start) / times[name])
    finally:
        if was:
            gc.enable()
    return {name: _ratio(seconds[name], seconds[base]) for name in names}


def _repeats(call: Callable[[], object], least: float) -> int:
    call()  # warm up
    start = time.perf_counter()
    call()
    return max(1, round(least / max(1e-9, time.perf_counter() - start)))


def _ratio(own: list[float], base: list[float]) -> Figure:
    return Figure.turns([mine / theirs for mine, theirs in zip(own, base, strict=True)])
