"""A run that is killed at any time resumes to bitwise equal weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.training import Recipe
from tests.training.kill_script import FAST_RECIPE, LONG_RECIPE
from tests.training.tiny import NOISY, checkpoint_folder, checkpoint_steps, drop_timing, run, same_tensors, same_weights

ROOT = Path(__file__).parents[2]


def run_kill_script(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.kill_script", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr}


def check_same_run(out: Path, reference: Path, recipe: Recipe) -> None:
    """Check that the folder of a killed run has the same contents as that of an uninterrupted run."""
    assert same_weights(hw.load(out / "model"), hw.load(reference / "model"))
    # A run that was killed before it dropped old checkpoints may have one more.
    assert set(checkpoint_steps(reference)) <= set(checkpoint_steps(out))
    for name in ("optimizer.safetensors", "model.safetensors"):
        assert same_tensors(
            checkpoint_folder(out, recipe.steps) / name, checkpoint_folder(reference, recipe.steps) / name
        )
    rows = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (out, reference)]
    assert drop_timing(rows[0]) == drop_timing(rows[1])
    assert not [path for path in (out / "checkpoints").iterdir() if not path.name.startswith("step-")]


def hidden_files(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name.startswith("."))


def check_kills_at_events(tmp_path: Path, first: int, step: int) -> None:
    run(NOISY, FAST_RECIPE, tmp_path / "whole")
    report = run_kill_script("by-event", str(tmp_path / "runs"), str(first), str(step))
    assert report["last"] == 0, report["said"]
    assert len(report["codes"]) >= 3
    stuck = [event for event, code in report["codes"].items() if code != 0]
    assert stuck == [], report["said"]
    for event in report["codes"]:
        check_same_run(tmp_path / "runs" / event, tmp_path / "whole", FAST_RECIPE)


def test_train_killed_at_some_file_events_resumes_exactly(tmp_path: Path) -> None:
    check_kills_at_events(tmp_path, 7, 37)


@pytest.mark.slow
def test_train_killed_at_every_file_event_resumes_exactly(tmp_path: Path) -> None:
    check_kills_at_events(tmp_path, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_train_killed_at_random_times_resumes_exactly(seed: int, tmp_path: Path) -> None:
    report = run_kill_script("at-random", str(tmp_path / "run"), "25", str(seed))
    assert report["last"] == 0, report["said"]
    run(NOISY, LONG_RECIPE, tmp_path / "whole")
    check_same_run(tmp_path / "run", tmp_path / "whole", LONG_RECIPE)


def test_train_killed_during_checkpoint_write_resumes_exactly(tmp_path: Path) -> None:
    report = run_kill_script("while-writing", str(tmp_path / "run"), "3")
    assert report["last"] == 0, report["said"]
    assert (report["kills"], report["writing"]) == (3, 3)
    run(NOISY, LONG_RECIPE, tmp_path / "whole")
    check_same_run(tmp_path / "run", tmp_path / "whole", LONG_RECIPE)


@pytest.mark.slow
def test_train_killed_during_many_checkpoint_writes_resumes_exactly(tmp_path: Path) -> None:
    report = run_kill_script("while-writing", str(tmp_path / "run"), "25")
    assert report["last"] == 0, report["said"]
    assert report["kills"] == 25
    assert report["writing"] >= 20
    run(NOISY, LONG_RECIPE, tmp_path / "whole")
    check_same_run(tmp_path / "run", tmp_path / "whole", LONG_RECIPE)
    assert hidden_files(tmp_path / "run") == []


def test_train_partial_run_json_does_not_block_folder(tmp_path: Path) -> None:
    """run.json is first written to a temporary file. A kill at that time must not block the folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json-abcd1234").write_text('{"spec"')
    assert run(NOISY, FAST_RECIPE, tmp_path / "run").step == 4


def test_train_finished_run_removes_partial_files(tmp_path: Path) -> None:
    run(NOISY, FAST_RECIPE, tmp_path / "run")
    for name in (".model-abcd1234", ".tokens-abcd1234"):
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "run" / ".metrics.jsonl-abcd1234").write_text("half")
    run(NOISY, FAST_RECIPE, tmp_path / "run")
    assert hidden_files(tmp_path / "run") == []
