"""Two processes that share each batch end where one would."""

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
from tests.training.tiny import distance, run, same_weights

ROOT = Path(__file__).parents[2]


def team(*arguments: str, good: bool = True, script: str = "tests.training.team_script") -> list[dict[str, Any]]:
    """Run a script in two processes; what each told."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", script, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert (done.returncode == 0) == good, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_two_share_a_batch_and_end_where_one_does(tmp_path: Path) -> None:
    told = team(str(tmp_path / "two"), "causal")
    assert sorted(row["rank"] for row in told) == [0, 1]
    assert told[0]["weight"] == told[1]["weight"]  # both hold the same model
    assert told[0]["loss"] == told[1]["loss"]
    assert told[0]["valid"] == told[1]["valid"]
    one = run(SPECS["causal"], replace(RECIPE, accumulate=2))
    assert distance(one.model, hw.load(tmp_path / "two" / "model")) < 1e-5
    assert told[0]["loss"] == pytest.approx(one.loss, abs=1e-4)
    assert told[0]["valid"] == pytest.approx(one.valid_loss, abs=1e-4)
    rows = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["step"] for row in one.history]  # one of them writes
    for row, alone in zip(rows, one.history, strict=True):
        for name in ("loss", "valid_loss", "gradient"):
            assert row.get(name) == pytest.approx(alone.get(name), abs=1e-4)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == [
        *("checkpoints", "metrics.jsonl", "model", "run.json", "tokens")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "pooler"])
def test_where_tokens_are_hidden_too(kind: str, tmp_path: Path) -> None:
    told = team(str(tmp_path / "two"), kind)
    one = run(SPECS[kind], RECIPE)
    assert told[0]["weight"] == told[1]["weight"]
    assert told[0]["valid"] == pytest.approx(one.valid_loss, abs=1e-3)
    assert distance(one.model, hw.load(tmp_path / "two" / "model")) < 1e-5


@pytest.mark.slow
def test_a_team_needs_no_folder() -> None:
    told = team("-", "causal")
    one = run(SPECS["causal"], replace(RECIPE, accumulate=2))
    assert [row["step"] for row in told] == [10, 10]
    assert told[0]["weight"] == told[1]["weight"]
    assert told[0]["loss"] == pytest.approx(one.loss, abs=1e-4)


@pytest.mark.slow
def test_a_team_resumes_bitwise(tmp_path: Path) -> None:
    whole = team(str(tmp_path / "whole"), "noisy")
    assert whole[0]["weight"] == whole[1]["weight"]
    team(str(tmp_path / "broken"), "noisy", "7", good=False)
    assert not (tmp_path / "broken" / "model").exists()
    team(str(tmp_path / "broken"), "noisy")
    one, other = (hw.load(tmp_path / name / "model") for name in ("whole", "broken"))
    assert same_weights(one, other)
    files = [
        tmp_path / name / "checkpoints" / "step-00000010" / "optimizer.safetensors" for name in ("whole", "broken")
    ]
    a, b = (load_file(path) for path in files)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
