"""Two processes, one of which is killed at random times: the other reports it, and the run resumes bitwise equal."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headwise as hw
from tests.distributed.kill_script import PEER_LOST_CODE
from tests.training.tiny import same_weights

ROOT = Path(__file__).parents[2]


def run_kill_script(folder: Path, name: str, parallel: str, steps: int, kills: int, seed: int) -> dict[str, Any]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.distributed.kill_script",
            str(folder),
            name,
            parallel,
            *map(str, (steps, kills, seed)),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def check_killed_run(tmp_path: Path, name: str, parallel: str, steps: int, kills: int, seed: int) -> None:
    result = run_kill_script(tmp_path / "killed", name, parallel, steps, kills, seed)
    assert result["last"] == [0, 0], result["stderr"]
    assert [end[0] for end in result["ends"]] == [-signal.SIGKILL] * kills
    # The other process detected the loss and exited by itself.
    assert {end[1] for end in result["ends"]} <= {PEER_LOST_CODE}, result["stderr"]
    assert result["longest"] < 60
    assert result["whole"] == [0, 0], result["stderr"]
    assert same_weights(*(hw.load(tmp_path / run / "model") for run in ("killed", "killed-whole")))  # pyright: ignore
    pieces = [tmp_path / run / "checkpoints" / f"step-{steps:08d}" / "shards" for run in ("killed", "killed-whole")]
    for expected, actual in zip(*(sorted(folder.iterdir()) for folder in pieces), strict=True):
        a, b = load_file(expected), load_file(actual)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)  # including optimizer moments
    folders = [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()]
    assert all(name.startswith("step-") for name in folders)


def test_train_killed_twice_resumes_same_weights(tmp_path: Path) -> None:
    check_killed_run(tmp_path, "grouped", "heads", 9, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parallel"), [("noisy", "heads"), ("noisy", "fsdp")])
def test_train_killed_many_times_resumes_same_weights(tmp_path: Path, name: str, parallel: str) -> None:
    check_killed_run(tmp_path, name, parallel, 80, 20, 2)
