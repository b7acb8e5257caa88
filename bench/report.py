"""Run the benchmarks, write one JSON file with machine, load, versions and medians, and fill docs/benchmarks.md from it.

python -m bench.report run --out docs/research/data/benchmarks.json          all benchmarks, about half an hour (make bench)
python -m bench.report run --out docs/research/data/benchmarks.json --short  fewer rounds, at most ten minutes on two cores
python -m bench.report run --out F.json --only imports "layer memory"        some benchmarks; results of others are kept
python -m bench.report fill docs/research/data/benchmarks.json               write the tables into docs/benchmarks.md

The page has blocks between `<!-- bench: BENCHMARK / TABLE -->` and `<!-- /bench -->`. A block whose benchmark is in the file
is replaced by its command and table; other blocks stay. Times that were measured while other processes used more than a tenth
of the machine are not written into the page.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.io.atomic_write import write_atomic

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
MAX_LOAD_OF_OTHERS = 0.1  # share of the machine's processor time that other processes may use while times are measured
_BLOCK = re.compile(r"(<!-- bench: (?P<name>[^>]+?) -->\n)(?P<content>.*?)(<!-- /bench -->)", re.DOTALL)


@dataclass(frozen=True)
class BenchmarkRun:
    """A benchmark as `bench.report` runs it.

    Attributes:
        module: Module in `bench`.
        options: Options of a complete run.
        short_options: Options of a short run. None leaves it out.
        has_times: Whether results depend on other work on the machine. Memory and sizes do not.
    """

    module: str
    options: tuple[str, ...] = ()
    short_options: tuple[str, ...] | None = None
    has_times: bool = True


RUNS: Mapping[str, BenchmarkRun] = {
    "imports": BenchmarkRun("imports", (), ()),
    "layer maps": BenchmarkRun("layer", ("maps", "--rounds", "15"), ("maps", "--rounds", "7")),
    "layers": BenchmarkRun("layer", ("layers", "--rounds", "31"), ("layers", "--rounds", "9")),
    "layer memory": BenchmarkRun("layer", ("memory",), None, has_times=False),
    "look": BenchmarkRun("look", ("ratios", "--rounds", "9"), ("ratios", "--headwise-only", "--rounds", "5")),
    "look memory": BenchmarkRun("look", ("memory",), ("memory",), has_times=False),
    "generate": BenchmarkRun("generate", ("smollm2", "--rounds", "5"), ("smollm2", "--rounds", "2", "--tokens", "128")),
    "importance": BenchmarkRun("importance", ("--rounds", "15"), ("--rounds", "5")),
    "load": BenchmarkRun("load", ("--rounds", "9"), None),
    "train": BenchmarkRun("train", ("--rounds", "9", "--forms", "eager"), None),
    "view": BenchmarkRun("view", (), None),
    "peers": BenchmarkRun("peers", ("--rounds", "3"), None),
}


def run_benchmarks(path: Path, names: Sequence[str], *, short: bool, folder: Path | None = None) -> dict[str, Any]:
    """Run benchmarks one after the other, each in a process of its own, and add their results to a JSON file.

    Args:
        path: JSON file. Results of other benchmarks in it are kept.
        names: Names of `RUNS`.
        short: Take the options of the short run.
        folder: Folder for the environments of other libraries (`bench.peers`).

    Returns:
        Content of the file: the results by benchmark. A benchmark that failed has the end of its error output.
    """
    results = json.loads(path.read_text()) if path.is_file() else {}
    for name in names:
        run = RUNS[name]
        options = run.short_options if short and run.short_options is not None else run.options
        more = ("--folder", str(folder)) if run.module == "peers" and folder else ()
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "result.json"
            command = [sys.executable, "-m", f"bench.{run.module}", *options, *more, "--json", str(out)]
            print(f"{name}: {' '.join(command[1:-2])}", file=sys.stderr, flush=True)
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            if done.returncode or not out.is_file():
                print(done.stderr[-2000:], file=sys.stderr)
                continue
            results[name] = json.loads(out.read_text()) | {"has times": run.has_times}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, (json.dumps(results, indent=1, ensure_ascii=False) + "\n").encode())
    return results


def fill_page(page: str, results: Mapping[str, Any], max_load: float = MAX_LOAD_OF_OTHERS) -> str:
    """Return a page with the tables of the results in its blocks.

    Args:
        page: Text with blocks. Blocks of benchmarks that have no results stay as they are.
        results: Results by benchmark, as `run_benchmarks` returns them.
        max_load: Largest share of the machine that other processes may have used while times were measured.

    Raises:
        HeadwiseError: A benchmark ran on a busy machine, or a block names a table that its benchmark does not have.
    """

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        benchmark, _, table_name = (part.strip() for part in name.partition("/"))
        if benchmark not in results:
            return match[0]
        result = results[benchmark]
        if result.get("has times", True) and result["load of others"] > max_load:
            raise HeadwiseError(
                f"{benchmark}: other processes used {result['load of others']:.0%} of the machine, more than {max_load:.0%}. "
                "Run it again on an idle machine."
            )
        tables = {table["name"]: table for table in result["tables"]}
        if table_name not in tables:
            raise HeadwiseError(f"{name}: the benchmark has no such table. It has {', '.join(tables)}.")
        table = tables[table_name]
        text = f"{describe_run(result)}\n\n{markdown_table(table['columns'], table['rows'])}"
        return f"{match[1]}\n{text}\n\n{match[4]}"

    return _BLOCK.sub(fill, page)


def describe_run(result: Mapping[str, Any]) -> str:
    """Return the command, date, machine and versions of a benchmark as a sentence."""
    machine, versions = result["machine"], result["versions"]
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items() if name not in ("python", "numpy"))
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    return (
        f"`{result['command']}` ({result['date']}; {machine['processor']}, {machine['instruction set']}, {cores}, {threads}; "
        f"{libraries}):"
    )


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown. Numbers have three digits and are aligned to the right."""
    rows = [list(row) for row in rows]
    is_number = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    lines = [list(columns), ["---:" if right else "---" for right in is_number]]
    lines += [[format_cell(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def format_cell(cell: object) -> str:
    """Return a number with three significant digits, or the text of any other cell."""
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return str(cell).replace("|", "\\|")
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run benchmarks and write the JSON file")
    run.add_argument("--out", type=Path, required=True, help="JSON file; results of other benchmarks in it are kept")
    run.add_argument("--only", nargs="+", choices=RUNS, help="names of benchmarks")
    run.add_argument("--short", action="store_true", help="fewer rounds, and only benchmarks of at most two minutes")
    run.add_argument("--folder", type=Path, help="folder for the environments of other libraries")
    fill = commands.add_parser("fill", help="write the tables into docs/benchmarks.md")
    fill.add_argument("path", type=Path, help="JSON file")
    options = parser.parse_args()
    if options.command == "fill":
        try:
            filled = fill_page(PAGE.read_text(), json.loads(options.path.read_text()))
        except HeadwiseError as error:
            sys.exit(str(error))
        write_atomic(PAGE, filled.encode())
        return
    names = options.only or [
        name for name, benchmark in RUNS.items() if not options.short or benchmark.short_options is not None
    ]
    results = run_benchmarks(options.out, names, short=options.short, folder=options.folder)
    missing = [name for name in names if name not in results]
    if missing:
        sys.exit(f"failed: {', '.join(missing)}")


if __name__ == "__main__":
    main()
