"""Time of a sweep of four small models with one and two workers, by processes and by Dask, without cached models.

python -m bench.sweep [--steps 300] [--rounds 2]

Prints wall time, CPU time of all processes, and the load of the machine before the run. On a busy machine two workers do not
halve the wall time.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time

from rich.console import Console

from headwise.experiments import head_sweep
from headwise.ui.terminal_table import make_table

EXECUTORS = [(executor, workers) for executor in ("processes", "dask") for workers in (1, 2)]


def run_single(executor: str, workers: int, steps: int) -> None:
    """Train four models without a cache. Runs in a separate process."""
    with tempfile.TemporaryDirectory() as cache:
        head_sweep((1, 4), width=32, steps=steps, seeds=2, cache=cache, processes=workers,
                      executor=None if executor == "processes" else executor)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--single", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single:
        run_single(options.single[0], int(options.single[1]), options.steps)
        return
    rows = []
    for turn in range(options.rounds):
        for executor, workers in EXECUTORS:
            load, before = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
            start = time.perf_counter()
            command = [sys.executable, "-m", "bench.sweep", "--steps", str(options.steps)]
            subprocess.run([*command, "--single", executor, str(workers)], check=True)
            wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            rows.append([turn, executor, workers, wall, busy, load])
            print(*rows[-1], file=sys.stderr, flush=True)
    columns = ["round", "executor", "workers", "wall seconds", "processor seconds", "load"]
    Console().print(make_table(f"head_sweep: 2 head counts, 2 seeds, {options.steps} steps", columns, rows))


if __name__ == "__main__":
    main()
