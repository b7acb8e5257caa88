"""Fair timing on a noisy machine: contestants take turns, and what is reported is a ratio with its spread."""

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant, and how many times quicker or slower than the base it was, round by round."""

    best: float
    median: float
    speed: float  # median over rounds of base time / own time: above 1 is quicker than the base
    low: float  # quartiles of the same
    high: float


def interleaved_timing(
    candidates: Mapping[str, Callable[[], object]],
    base: str,
    rounds: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Run everyone once a round, in a rotating order, and compare inside each round. `time.process_time` as the clock counts
    what the processor did for us alone: for one thread on a busy machine."""
    names = list(candidates)
    for name in names:
        candidates[name]()  # warm up
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for round_index in range(rounds):
            shift = round_index % len(names)
            for name in names[shift:] + names[:shift]:
                start = clock()
                candidates[name]()
                seconds[name].append(clock() - start)
    finally:
        gc.enable()
    timings = {}
    for name in names:
        ratios = sorted(b / own for b, own in zip(seconds[base], seconds[name], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        timings[name] = Timing(min(seconds[name]), statistics.median(seconds[name]), middle, low, high)
    return timings


def process_peak_memory(module: str, *arguments: str) -> float:
    """Run `python -m module arguments` on its own and read the number it prints: megabytes at its peak."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def machine() -> str:
    """What the figures were taken on."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, CPU"
