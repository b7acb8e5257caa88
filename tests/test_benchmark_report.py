"""The JSON file of the benchmarks, and docs/benchmarks.md, which is filled from it."""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from bench.measure import BenchmarkReport, Timing, add_parts, machine_facts, ratio_text, versions, without_json
from bench.report import PAGE, RUNS, fill_page, format_cell, markdown_table, run_benchmarks

ROOT = PAGE.parent.parent
STORED = ROOT / "docs" / "research" / "data" / "benchmarks.json"
TEXT = (
    "# Page\n\n<!-- bench: layers / times -->\nold\n<!-- /bench -->\n\n"
    "prose\n\n<!-- bench: other / one -->\nkept\n<!-- /bench -->\n"
)


def make_results(load: float = 0.0, **changes: Any) -> dict[str, Any]:
    table = {"name": "times", "title": "Times", "columns": ["", "ms"], "rows": [["first", 12.345], ["second", 1234.5]]}
    result = {
        "command": "python -m bench.layer layers",
        "date": "2026-11-01",
        "machine": {"processor": "A CPU", "instruction set": "AVX2", "cores": 2, "threads": 1},
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "load of others": load,
        "tables": [table],
    }
    return {"layers": result | changes}


def test_fill_page_replaces_only_blocks_with_results() -> None:
    assert fill_page(TEXT, make_results()) == (
        "# Page\n\n<!-- bench: layers / times -->\n\n"
        "`python -m bench.layer layers` (2026-11-01; A CPU, AVX2, 2 cores, 1 thread; torch 2.13.0):\n\n"
        "|  | ms |\n| --- | ---: |\n| first | 12.3 |\n| second | 1,234 |\n\n"
        "<!-- /bench -->\n\nprose\n\n<!-- bench: other / one -->\nkept\n<!-- /bench -->\n"
    )


def test_fill_page_twice_changes_nothing() -> None:
    once = fill_page(TEXT, make_results())
    assert fill_page(once, make_results()) == once


def test_fill_page_busy_machine_raises() -> None:
    with pytest.raises(hw.HeadwiseError, match="other processes used 42% of the machine"):
        fill_page(TEXT, make_results(load=0.42))
    fill_page(TEXT, make_results(load=0.42, **{"has times": False}))  # memory does not depend on other work


def test_fill_page_unknown_table_raises() -> None:
    with pytest.raises(hw.HeadwiseError, match="layers / times: the benchmark has no such table"):
        fill_page(TEXT, make_results(tables=[]))


@pytest.mark.parametrize(
    ("cell", "text"), [(0.98765, "0.988"), (12.345, "12.3"), (144, "144"), (152534, "152,534"), ("a|b", "a\\|b")]
)
def test_format_cell_three_digits(cell: object, text: str) -> None:
    assert format_cell(cell) == text


def test_markdown_table_aligns_only_columns_of_numbers() -> None:
    assert markdown_table(["a", "b"], [[1, "–"], [2, 3]]).splitlines()[1] == "| ---: | --- |"


def test_ratio_text_inverts_speed_and_quartiles() -> None:
    assert ratio_text(Timing(1.0, 1.0, speed=0.5, low=0.4, high=0.8)) == "2.00 (1.25–2.50)"


def test_report_writes_tables_machine_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "3", "--json", str(path)])
    clock, busy, own = iter([100.0, 110.0]), iter([50.0, 62.0]), iter([5.0, 7.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr("bench.measure.busy_seconds", lambda: next(busy))
    monkeypatch.setattr("bench.measure.own_seconds", lambda: next(own))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    report = BenchmarkReport("layer", path)
    report.add("times", "Times", ["", "ms"], [["first", 1.5]])
    report.keep("summary", "Summary", ["ratio"], [["1.00"]])
    report.write()
    content = json.loads(path.read_text())
    assert content["command"] == "python -m bench.layer --rounds 3"
    assert content["load of others"] == 0.5  # 10 of the 12 busy seconds, of 10 seconds on two cores
    assert [(table["name"], table["rows"]) for table in content["tables"]] == [
        ("times", [["first", 1.5]]),
        ("summary", [["1.00"]]),
    ]
    assert content["versions"]["torch"] == versions()["torch"]
    assert content["machine"]["cores"] == machine_facts()["cores"] >= 1


def test_without_json_keeps_other_arguments() -> None:
    assert without_json(["maps", "--json", "F", "--busy"]) == ["maps", "--busy"]
    assert without_json(["maps"]) == ["maps"]


def test_add_parts_default_and_unknown_part(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parts(parser, ["maps", "layers", "memory"], default=["maps", "layers"])
    assert parser.parse_args([]).parts == ["maps", "layers"]
    assert parser.parse_args(["memory"]).parts == ["memory"]
    with pytest.raises(SystemExit):
        parser.parse_args(["times"])
    assert "'times': not one of maps, layers, memory" in capsys.readouterr().err


def test_run_benchmarks_keeps_results_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is a process that writes its own file. A failed benchmark keeps its earlier result."""
    path = tmp_path / "all.json"
    path.write_text(json.dumps({"layers": {"command": "earlier"}, "load": {"command": "earlier"}}))

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if command[2] == "bench.load":
            return subprocess.CompletedProcess(command, 1, stderr="failed")
        Path(command[-1]).write_text(json.dumps({"command": " ".join(command[2:-2])}))
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    results = run_benchmarks(path, ["imports", "look memory", "load"], short=True)
    assert results == json.loads(path.read_text())
    assert results == {
        "layers": {"command": "earlier"},
        "load": {"command": "earlier"},
        "imports": {"command": "bench.imports", "has times": True},
        "look memory": {"command": "bench.look memory", "has times": False},
    }


def test_page_blocks_name_benchmarks_and_modules_exist() -> None:
    names = re.findall(r"<!-- bench: (.+?) / (.+?) -->", PAGE.read_text())
    assert names
    for benchmark, table in names:
        assert f'"{table}"' in (ROOT / "bench" / f"{RUNS[benchmark].module}.py").read_text()
    assert all((ROOT / "bench" / f"{run.module}.py").is_file() for run in RUNS.values())


@pytest.mark.skipif(not STORED.is_file(), reason="the benchmarks were not run on an idle machine yet")
def test_page_equals_stored_results() -> None:
    assert fill_page(PAGE.read_text(), json.loads(STORED.read_text())) == PAGE.read_text()
