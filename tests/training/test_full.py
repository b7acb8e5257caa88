"""A full disk and Ctrl-C print one line and lose no data."""

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
from headwise.training.checkpoint import CheckpointFolder
from tests.runner import CommandResult, run_command
from tests.training.tiny import TEXT, checkpoint_folder, checkpoint_steps, same_tensors, same_weights

SIZES = ["--layers", "1", "--num-heads", "2", "--width", "16", "--context", "8", "--batch-size", "4", "--warmup", "2"]


def train_command(text: Path, out: Path, steps: int, *extra: str) -> list[str]:
    options = ["--out", str(out), "--steps", str(steps), "--json", *SIZES, *extra]
    return [sys.executable, "-m", "headwise", "train", str(text), *options]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run_train_process(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(train_command(*arguments), capture_output=True, text=True, env=environment(), timeout=600)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return path


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Limit the file size of this process, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "words.txt").write_text(TEXT)
    done = run_train_process(folder / "words.txt", folder / "run", 12, "--save-every", "3")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def run_train(*arguments: Any) -> CommandResult:
    return run_command(*train_command(*arguments)[3:])


# Too little space for the optimizer state, the weights, the tokenizer, or the first record.
@pytest.mark.parametrize("name", ["optimizer.safetensors", "model.safetensors", "tokenizer.json", "spec.json"])
def test_train_full_disk_reports_and_resumes(name: str, text: Path, finished_run: Path, tmp_path: Path) -> None:
    size, out = (checkpoint_folder(finished_run, 12) / name).stat().st_size, tmp_path / "run"
    with file_size_limit(size - 100):
        done = run_train(text, out, 12, "--save-every", "3")
    assert "could not be written" in done.error_line
    assert not (out / "model").exists()
    assert [path for path in out.rglob(".*") if path.is_dir()] == []  # no partial folder is left
    done = run_train(text, out, 12, "--save-every", "3")
    assert done.code == 0, done.err
    assert same_weights(hw.load(out / "model"), hw.load(finished_run / "model"))


def test_train_disk_fills_up_keeps_previous_checkpoint(
    text: Path, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_save, count, out = CheckpointFolder.save, 0, tmp_path / "run"

    def save(*arguments: Any) -> None:
        nonlocal count
        count += 1
        with file_size_limit(30_000 if count >= 3 else 1 << 40):
            original_save(*arguments)

    monkeypatch.setattr(CheckpointFolder, "save", save)
    assert "could not be written" in run_train(text, out, 12, "--save-every", "3").error_line
    monkeypatch.undo()
    assert checkpoint_steps(out) == [3, 6]
    assert not list((out / "checkpoints").glob(".*"))
    done = run_train_process(text, out, 12, "--save-every", "3")
    assert done.returncode == 0, done.stderr
    assert "resuming from step 6" in done.stderr
    assert same_weights(hw.load(out / "model"), hw.load(finished_run / "model"))


def parse_strict_json(text: str) -> dict[str, Any]:
    """Parse standard JSON, without NaN."""

    def reject_constant(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=reject_constant)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_train_signal_saves_checkpoint_and_reports(number: int, text: Path, tmp_path: Path) -> None:
    steps, out = 3000, tmp_path / "run"
    process = subprocess.Popen(
        train_command(text, out, steps, "--save-every", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    deadline = time.monotonic() + 600
    while not checkpoint_steps(out) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    report = json.loads(output)
    assert report["stop_reason"] == "interrupted"
    assert 2 <= report["steps"] < steps
    assert checkpoint_steps(out)[-1] == report["steps"]
    assert not (out / "model").exists()
    parse_strict_json(output)  # interrupted before the first logged loss: the loss is null, not NaN


@pytest.mark.slow
def test_train_interrupted_three_times_ends_bitwise_equal(text: Path, tmp_path: Path) -> None:
    arguments = (300, "--save-every", "50", "--evaluate-every", "70")
    for n in range(3):
        process = subprocess.Popen(
            train_command(text, tmp_path / "run", *arguments),  # pyright: ignore[reportArgumentType]
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        deadline, before = time.monotonic() + 600, checkpoint_steps(tmp_path / "run")
        while checkpoint_steps(tmp_path / "run") == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 130, (n, errors)
    for name in ("run", "whole"):
        done = run_train_process(text, tmp_path / name, *arguments)
        assert done.returncode == 0, done.stderr
    assert same_weights(hw.load(tmp_path / "run" / "model"), hw.load(tmp_path / "whole" / "model"))
    last = [checkpoint_folder(tmp_path / name, 300) / "optimizer.safetensors" for name in ("run", "whole")]
    assert same_tensors(*last)
