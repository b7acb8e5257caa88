"""Damaged checkpoints are detected, reported and never used."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headwise.errors import HeadwiseError
from headwise.training import Recipe, TrainResult
from tests.training.tiny import (
    NOISY,
    PLAIN,
    SHORT,
    assert_same_run,
    checkpoint_folder,
    checkpoint_steps,
    run,
    run_interrupted,
    same_weights,
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return run(NOISY, SHORT, tmp_path_factory.mktemp("whole") / "run")


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def truncate_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the weights": lambda folder: flip_bit(folder / "model.safetensors", -10),
    "a bit of the optimizer": lambda folder: flip_bit(folder / "optimizer.safetensors", -10),
    "a bit of the state": lambda folder: flip_bit(folder / "training.json", 12),
    "a bit of the header": lambda folder: flip_bit(folder / "model.safetensors", 20),
    "truncated weights": lambda folder: truncate_file(folder / "model.safetensors"),
    "empty optimizer": lambda folder: (folder / "optimizer.safetensors").write_bytes(b""),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "truncated checksums": lambda folder: (folder / "checksums.json").write_text('{"model.safe'),
    "empty checksums": lambda folder: (folder / "checksums.json").write_text("{}"),
    "checksums of another kind": lambda folder: (folder / "checksums.json").write_text("[1, 2]"),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_resume_damaged_checkpoint_falls_back_bitwise(
    name: str, uninterrupted: TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run_interrupted(NOISY, SHORT, out, 15)
    newest, before = checkpoint_steps(out)[-1], checkpoint_steps(out)[-2]
    DAMAGE[name](checkpoint_folder(out, newest))
    capsys.readouterr()
    result = run(NOISY, SHORT, out)
    captured = capsys.readouterr()
    assert f"step {newest} is damaged" in captured.err
    assert f"resuming from step {before}" in captured.err
    assert captured.out == ""
    assert_same_run(uninterrupted, result)


def test_resume_all_checkpoints_damaged_raises(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_interrupted(PLAIN, SHORT, out, 15)
    for step in checkpoint_steps(out):
        flip_bit(checkpoint_folder(out, step) / "model.safetensors", -1)
    with pytest.raises(HeadwiseError, match=r"every checkpoint.*damaged"):
        run(PLAIN, SHORT, out)


def test_resume_partial_checkpoint_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    run_interrupted(PLAIN, SHORT, out, 15)
    newest = checkpoint_steps(out)[-1]
    shutil.copytree(checkpoint_folder(out, newest), out / "checkpoints" / ".step-00000099-abc")
    (out / "checkpoints" / ".step-00000099-abc" / "checksums.json").unlink()
    result = run(PLAIN, SHORT, out)
    assert not [path for path in (out / "checkpoints").iterdir() if path.name.startswith(".")]
    assert same_weights(result.model, run(PLAIN, SHORT).model)
    assert "damaged" not in capsys.readouterr().err


def test_resume_damaged_best_checkpoint_is_not_returned(tmp_path: Path) -> None:
    recipe = Recipe(
        steps=60,
        batch_size=8,
        learning_rate=3e-2,
        warmup=0,
        save_every=3,
        evaluate_every=2,
        patience=4,
        log_every=3,
        keep_checkpoints=1,
    )
    text, held_out = "ab" * 300, "ba cd " * 40 + "xyz" * 60
    reference = run(PLAIN, recipe, tmp_path / "whole", text=text, valid=held_out)
    assert reference.stop_reason == "early"
    out = tmp_path / "run"
    run_interrupted(PLAIN, recipe, out, reference.step - 1, text=text, valid=held_out)
    assert checkpoint_steps(out)[0] == reference.best_step < checkpoint_steps(out)[-1]
    flip_bit(checkpoint_folder(out, reference.best_step) / "model.safetensors", -2)
    try:
        result = run(PLAIN, recipe, out, text=text, valid=held_out)
    except HeadwiseError as error:
        assert "damaged" in str(error)  # noqa: PT017
    else:
        assert same_weights(result.model, reference.model)


def test_resume_damaged_tokens_or_run_json_raises(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_interrupted(PLAIN, SHORT, out, 15)
    good = (out / "tokens" / "train.bin").read_bytes()
    flip_bit(out / "tokens" / "train.bin", 40)
    with pytest.raises(HeadwiseError, match=r"train\.bin: the file is damaged"):
        run(PLAIN, SHORT, out)
    (out / "tokens" / "train.bin").write_bytes(good)
    run(PLAIN, SHORT, out)
    (out / "run.json").write_text("{")
    with pytest.raises(HeadwiseError, match=r"run\.json: the file is damaged"):
        run(PLAIN, SHORT, out)


def test_resume_deleted_tokens_are_rebuilt(tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = replace(SHORT, seed=9)
    run_interrupted(PLAIN, recipe, out, 15)
    shutil.rmtree(out / "tokens")
    assert same_weights(run(PLAIN, recipe, out).model, run(PLAIN, recipe).model)


def test_resume_truncated_metrics_line_is_rewritten(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_interrupted(PLAIN, SHORT, out, 15)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 15, "lo')
    assert_same_run(run(PLAIN, SHORT, tmp_path / "whole"), run(PLAIN, SHORT, out))
