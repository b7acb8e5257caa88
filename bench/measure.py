"""Timing on a noisy machine: candidates alternate, and results are ratios with quartiles.

A benchmark reports its tables to a `BenchmarkReport`, which prints them and writes them as JSON (`--json FILE`) together with
the machine, its load and the versions. `bench.report` merges these files and fills docs/benchmarks.md.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from headwise.io.atomic_write import write_atomic
from headwise.ui.terminal_table import make_table

PACKAGES = ("torch", "transformers", "x-transformers", "transformer-lens", "bertviz", "numpy")


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


def machine_facts() -> dict[str, Any]:
    """Return the processor, its cores and instruction set, and the memory."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    model = ", family ".join(filter(None, [fields.get("model name", platform.machine()), fields.get("cpu family")]))
    return {
        "processor": model + (f", model {fields['model']}" if "model" in fields else ""),
        "cores": len(os.sched_getaffinity(0)),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "memory GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that take part in benchmarks."""
    installed = {
        dist.name.lower().replace("_", "-"): dist.version for dist in importlib.metadata.distributions() if dist.name
    }
    return {"python": platform.python_version()} | {name: installed[name] for name in PACKAGES if name in installed}


def busy_seconds() -> float:
    """Return the processor time that all processes, and other virtual machines on its cores, have used since the start."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return the processor time of this process and of its finished child processes."""
    usages = (resource.getrusage(process) for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class BenchmarkReport:
    """The tables of one benchmark: printed at once, and written as JSON when the benchmark has ended.

    Args:
        benchmark: Name of the module in `bench`.
        path: JSON file. None only prints.
        width: Width of the printed tables.
    """

    def __init__(self, benchmark: str, path: Path | None = None, width: int = 120) -> None:
        self.benchmark, self.path = benchmark, path
        self.console = Console(file=sys.stdout, width=width)
        self.tables: list[dict[str, Any]] = []
        self._start = (time.perf_counter(), busy_seconds(), own_seconds()) if path else None

    def add(self, name: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Print a table and keep it for the JSON file.

        Args:
            name: Name of the table, by which `bench.report` finds it.
            title: Printed title.
            columns: Headings.
            rows: Cells: numbers or texts.
        """
        rows = [list(row) for row in rows]
        self.console.print(make_table(title, list(columns), rows))
        self.keep(name, title, columns, rows)

    def keep(self, name: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Keep a table for the JSON file without printing it. Arguments as in `add`."""
        rows = [list(row) for row in rows]
        self.tables.append({"name": name, "title": title, "columns": list(columns), "rows": rows})

    def write(self) -> None:
        """Write the tables, the command, the versions and the load of the machine, if a file was given."""
        if self.path is None or self._start is None:
            return
        seconds, busy, own = (
            now - start
            for now, start in zip((time.perf_counter(), busy_seconds(), own_seconds()), self._start, strict=True)
        )
        content = {
            "benchmark": self.benchmark,
            "command": " ".join(["python -m", f"bench.{self.benchmark}", *without_json(sys.argv[1:])]),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine_facts() | {"threads": torch.get_num_threads()},
            "versions": versions(),
            "seconds": round(seconds, 1),
            "load of others": round(max(0.0, busy - own) / (seconds * (os.cpu_count() or 1)), 3),
            "tables": self.tables,
        }
        write_atomic(self.path, json.dumps(content, indent=1).encode())


def without_json(arguments: Sequence[str]) -> list[str]:
    """Return command-line arguments without `--json FILE`."""
    position = arguments.index("--json") if "--json" in arguments else len(arguments)
    return [*arguments[:position], *arguments[position + 2 :]]


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json FILE` to the options of a benchmark."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the tables, with machine and load, to FILE"
    )


def add_parts(parser: argparse.ArgumentParser, parts: Sequence[str], default: Sequence[str] = ()) -> None:
    """Add the parts of a benchmark as arguments. Without any, `default` is run, or all parts if it is empty.

    Args:
        parser: Parser of the benchmark.
        parts: Names.
        default: Parts that run if none is named.
    """

    def part(name: str) -> str:
        if name not in parts:
            raise argparse.ArgumentTypeError(f"{name!r}: not one of {', '.join(parts)}")
        return name

    # `choices` would reject the default, a list, in Python 3.11
    parser.add_argument("parts", nargs="*", type=part, default=list(default or parts), help=", ".join(parts))


def ratio_text(timing: Timing) -> str:
    """Return time as a multiple of the base candidate's, with quartiles: `1.05 (1.02–1.11)`."""
    return f"{1 / timing.speed:.2f} ({1 / timing.high:.2f}–{1 / timing.low:.2f})"
