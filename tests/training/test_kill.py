"""Killed at any moment, a run goes on to the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.training import Recipe
from tests.training.kill_script import LONG, QUICK
from tests.training.tiny import NOISY, checkpoint, run, same_file, same_weights, there, timeless

ROOT = Path(__file__).parents[2]


def script(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.kill_script", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "said": done.stderr}


def compare(out: Path, whole: Path, recipe: Recipe) -> None:
    """A folder that went through kills holds what an unbroken run's folder holds, and nothing else."""
    assert same_weights(hw.load(out / "model"), hw.load(whole / "model"))
    assert set(there(whole)) <= set(there(out))  # one killed before it tidied up may have one more
    for name in ("optimizer.safetensors", "model.safetensors"):
        assert same_file(checkpoint(out, recipe.steps) / name, checkpoint(whole, recipe.steps) / name)
    rows = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (out, whole)]
    assert timeless(rows[0]) == timeless(rows[1])
    assert not [path for path in (out / "checkpoints").iterdir() if not path.name.startswith("step-")]


def litter(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.name.startswith("."))


def by_event(tmp_path: Path, first: int, step: int) -> None:
    run(NOISY, QUICK, tmp_path / "whole")
    told = script("by-event", str(tmp_path / "runs"), str(first), str(step))
    assert told["last"] == 0, told["said"]
    assert len(told["codes"]) >= 3
    stuck = [event for event, code in told["codes"].items() if code != 0]
    assert stuck == [], told["said"]
    for event in told["codes"]:
        compare(tmp_path / "runs" / event, tmp_path / "whole", QUICK)


def test_killed_at_some_file_events(tmp_path: Path) -> None:
    by_event(tmp_path, 7, 37)


@pytest.mark.slow
def test_killed_at_every_file_event(tmp_path: Path) -> None:
    by_event(tmp_path, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_random_many_times(seed: int, tmp_path: Path) -> None:
    told = script("at-random", str(tmp_path / "run"), "25", str(seed))
    assert told["last"] == 0, told["said"]
    run(NOISY, LONG, tmp_path / "whole")
    compare(tmp_path / "run", tmp_path / "whole", LONG)


def test_killed_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    told = script("while-writing", str(tmp_path / "run"), "3")
    assert told["last"] == 0, told["said"]
    assert (told["kills"], told["writing"]) == (3, 3)
    run(NOISY, LONG, tmp_path / "whole")
    compare(tmp_path / "run", tmp_path / "whole", LONG)


@pytest.mark.slow
def test_killed_while_checkpoints_are_written_many_times(tmp_path: Path) -> None:
    told = script("while-writing", str(tmp_path / "run"), "25")
    assert told["last"] == 0, told["said"]
    assert told["kills"] == 25
    assert told["writing"] >= 20
    run(NOISY, LONG, tmp_path / "whole")
    compare(tmp_path / "run", tmp_path / "whole", LONG)
    assert litter(tmp_path / "run") == []


def test_a_kill_as_the_folder_is_claimed_does_not_lock_it(tmp_path: Path) -> None:
    """The record of a run is written beside its place first: a kill there leaves that, and it belongs to nobody else."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json-abcd1234").write_text('{"spec"')
    assert run(NOISY, QUICK, tmp_path / "run").step == 4


def test_what_kills_leave_behind_is_swept_up(tmp_path: Path) -> None:
    run(NOISY, QUICK, tmp_path / "run")
    for name in (".model-abcd1234", ".tokens-abcd1234"):
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "run" / ".metrics.jsonl-abcd1234").write_text("half")
    run(NOISY, QUICK, tmp_path / "run")
    assert litter(tmp_path / "run") == []
