"""A disk that is full, and Ctrl-C: told in a line, and nothing is lost."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.training.checkpoint import Checkpoints
from tests.runner import Done, headwise
from tests.training.tiny import TEXT, checkpoint, same_file, same_weights, there

SIZES = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "8", "--batch", "4", "--warmup", "2"]


def command(text: Path, out: Path, steps: int, *more: str) -> list[str]:
    asked = ["--out", str(out), "--steps", str(steps), "--json", *SIZES, *more]
    return [sys.executable, "-m", "headwise", "train", str(text), *asked]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def train(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environment(), timeout=100)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return path


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: as on a disk that is full, but for this process alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "words.txt").write_text(TEXT)
    done = train(folder / "words.txt", folder / "run", 12, "--save-every", "3")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def run(*arguments: Any) -> Done:
    return headwise(*command(*arguments)[3:])


# Too little room for the optimizer's file, for the weights, for the tokenizer, for the very first record.
@pytest.mark.parametrize("name", ["optimizer.safetensors", "model.safetensors", "tokenizer.json", "spec.json"])
def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(
    name: str, text: Path, whole: Path, tmp_path: Path
) -> None:
    size, out = (checkpoint(whole, 12) / name).stat().st_size, tmp_path / "run"
    with room_for(size - 100):
        said = run(text, out, 12, "--save-every", "3")
    assert "could not be written" in said.refused
    assert not (out / "model").exists()
    assert [path for path in out.rglob(".*") if path.is_dir()] == []  # nothing half-written stays
    said = run(text, out, 12, "--save-every", "3")
    assert said.code == 0, said.err
    assert same_weights(hw.load(out / "model"), hw.load(whole / "model"))


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, count, out = Checkpoints.save, 0, tmp_path / "run"

    def save(*arguments: Any) -> None:
        nonlocal count
        count += 1
        with room_for(30_000 if count >= 3 else 1 << 40):
            saved(*arguments)

    monkeypatch.setattr(Checkpoints, "save", save)
    assert "could not be written" in run(text, out, 12, "--save-every", "3").refused
    monkeypatch.undo()
    assert there(out) == [3, 6]
    assert not list((out / "checkpoints").glob(".*"))
    done = train(text, out, 12, "--save-every", "3")
    assert done.returncode == 0, done.stderr
    assert "going on from step 6" in done.stderr
    assert same_weights(hw.load(out / "model"), hw.load(whole / "model"))


def strict(text: str) -> dict[str, Any]:
    """JSON as the standard has it: no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_asked_to_stop_it_saves_and_tells(number: int, text: Path, tmp_path: Path) -> None:
    steps, out = 3000, tmp_path / "run"
    started = subprocess.Popen(
        command(text, out, steps, "--save-every", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    until = time.monotonic() + 60
    while not there(out) and time.monotonic() < until:
        time.sleep(0.01)
    started.send_signal(number)
    said, errors = started.communicate(timeout=60)
    assert started.returncode == 130, errors
    assert "Traceback" not in errors
    told = json.loads(said)
    assert told["stopped"] == "interrupted"
    assert 2 <= told["steps"] < steps
    assert there(out)[-1] == told["steps"]
    assert not (out / "model").exists()
    strict(said)  # stopped before the first loss was logged, it has no loss to tell, and says so in JSON


@pytest.mark.slow
def test_stopped_thrice_it_ends_in_the_same_bits(text: Path, tmp_path: Path) -> None:
    arguments = (300, "--save-every", "50", "--evaluate-every", "70")
    for n in range(3):
        started = subprocess.Popen(
            command(text, tmp_path / "run", *arguments),  # pyright: ignore[reportArgumentType]
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        until, before = time.monotonic() + 60, there(tmp_path / "run")
        while there(tmp_path / "run") == before and started.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=60)
        assert started.returncode == 130, (n, errors)
    for name in ("run", "whole"):
        done = train(text, tmp_path / name, *arguments)
        assert done.returncode == 0, done.stderr
    assert same_weights(hw.load(tmp_path / "run" / "model"), hw.load(tmp_path / "whole" / "model"))
    last = [checkpoint(tmp_path / name, 300) / "optimizer.safetensors" for name in ("run", "whole")]
    assert same_file(*last)
