"""Timing on a noisy machine: candidates alternate, and results are ratios with quartiles."""

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
    """Seconds of one candidate, and its speed relative to the base candidate per round."""

    best: float
    median: float
    speed: float  # median over rounds of base time / own time; above 1 is faster than the base
    low: float  # quartiles of `speed`
    high: float


def interleaved_timing(
    candidates: Mapping[str, Callable[[], object]],
    base: str,
    rounds: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Run all candidates once per round in rotating order and compare within each round.

    Use `time.process_time` as the clock for single-threaded candidates on a busy machine.
    """
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
    """Run `python -m module arguments` in a separate process and return the peak memory in MB that it prints."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def machine() -> str:
    """Describe the CPU and the software versions."""
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, CPU"
