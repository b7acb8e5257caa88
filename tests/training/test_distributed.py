"""Two processes that share each batch reach the same weights as one process."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headwise as hw
from tests.training.team_script import RECIPE, SPECS
from tests.training.tiny import max_weight_difference, run, same_weights

ROOT = Path(__file__).parents[2]


def run_two_processes(
    *arguments: str, succeeds: bool = True, script: str = "tests.training.team_script"
) -> list[dict[str, Any]]:
    """Run a script in two processes and return the report of each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", script, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert (done.returncode == 0) == succeeds, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_train_two_processes_equal_one(tmp_path: Path) -> None:
    reports = run_two_processes(str(tmp_path / "two"), "causal")
    assert sorted(row["rank"] for row in reports) == [0, 1]
    assert reports[0]["weight"] == reports[1]["weight"]  # both processes have the same model
    assert reports[0]["loss"] == reports[1]["loss"]
    assert reports[0]["valid"] == reports[1]["valid"]
    single = run(SPECS["causal"], replace(RECIPE, accumulation_steps=2))
    assert max_weight_difference(single.model, hw.load(tmp_path / "two" / "model")) < 1e-5
    assert reports[0]["loss"] == pytest.approx(single.loss, abs=1e-4)
    assert reports[0]["valid"] == pytest.approx(single.valid_loss, abs=1e-4)
    rows = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["step"] for row in single.history]  # one process writes the metrics
    for row, single_row in zip(rows, single.history, strict=True):
        for name in ("loss", "valid_loss", "grad_norm"):
            assert row.get(name) == pytest.approx(single_row.get(name), abs=1e-4)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        *("checkpoints", "metrics.jsonl", "model", "run.json", "tokens")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "pooler"])
def test_train_masked_two_processes_equal_one(kind: str, tmp_path: Path) -> None:
    reports = run_two_processes(str(tmp_path / "two"), kind)
    single = run(SPECS[kind], RECIPE)
    assert reports[0]["weight"] == reports[1]["weight"]
    assert reports[0]["valid"] == pytest.approx(single.valid_loss, abs=1e-3)
    assert max_weight_difference(single.model, hw.load(tmp_path / "two" / "model")) < 1e-5


@pytest.mark.slow
def test_train_two_processes_without_folder_equal_one() -> None:
    reports = run_two_processes("-", "causal")
    single = run(SPECS["causal"], replace(RECIPE, accumulation_steps=2))
    assert [row["step"] for row in reports] == [10, 10]
    assert reports[0]["weight"] == reports[1]["weight"]
    assert reports[0]["loss"] == pytest.approx(single.loss, abs=1e-4)


@pytest.mark.slow
def test_train_two_processes_resume_bitwise(tmp_path: Path) -> None:
    reports = run_two_processes(str(tmp_path / "whole"), "noisy")
    assert reports[0]["weight"] == reports[1]["weight"]
    run_two_processes(str(tmp_path / "broken"), "noisy", "7", succeeds=False)
    assert not (tmp_path / "broken" / "model").exists()
    run_two_processes(str(tmp_path / "broken"), "noisy")
    uninterrupted, resumed = (hw.load(tmp_path / name / "model") for name in ("whole", "broken"))
    assert same_weights(uninterrupted, resumed)
    files = [
        tmp_path / name / "checkpoints" / "step-00000010" / "optimizer.safetensors" for name in ("whole", "broken")
    ]
    a, b = (load_file(path) for path in files)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
