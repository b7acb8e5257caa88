"""Checkpoints that were damaged: noticed, said aloud, never used."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headwise.errors import HeadwiseError
from headwise.training import Recipe, Trained
from tests.training.tiny import NOISY, PLAIN, SHORT, broken, checkpoint, run, same_run, same_weights, there


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(NOISY, SHORT, tmp_path_factory.mktemp("whole") / "run")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the weights": lambda folder: flip(folder / "model.safetensors", -10),
    "a bit of the optimizer": lambda folder: flip(folder / "optimizer.safetensors", -10),
    "a bit of the state": lambda folder: flip(folder / "training.json", 12),
    "a bit of the header": lambda folder: flip(folder / "model.safetensors", 20),
    "truncated weights": lambda folder: cut(folder / "model.safetensors"),
    "empty optimizer": lambda folder: (folder / "optimizer.safetensors").write_bytes(b""),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "truncated checksums": lambda folder: (folder / "checksums.json").write_text('{"model.safe'),
    "empty checksums": lambda folder: (folder / "checksums.json").write_text("{}"),
    "checksums of another kind": lambda folder: (folder / "checksums.json").write_text("[1, 2]"),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed_said_and_made_good(
    name: str, whole: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    broken(NOISY, SHORT, out, 15)
    newest, before = there(out)[-1], there(out)[-2]
    DAMAGE[name](checkpoint(out, newest))
    capsys.readouterr()
    made = run(NOISY, SHORT, out)
    said = capsys.readouterr()
    assert f"step {newest} is damaged" in said.err
    assert f"going on from step {before}" in said.err
    assert said.out == ""
    same_run(whole, made)


def test_where_all_are_damaged_it_says_so_and_stops(tmp_path: Path) -> None:
    out = tmp_path / "run"
    broken(PLAIN, SHORT, out, 15)
    for step in there(out):
        flip(checkpoint(out, step) / "model.safetensors", -1)
    with pytest.raises(HeadwiseError, match=r"every checkpoint.*damaged"):
        run(PLAIN, SHORT, out)


def test_what_a_kill_leaves_behind_is_swept_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    broken(PLAIN, SHORT, out, 15)
    newest = there(out)[-1]
    shutil.copytree(checkpoint(out, newest), out / "checkpoints" / ".step-00000099-abc")
    (out / "checkpoints" / ".step-00000099-abc" / "checksums.json").unlink()
    made = run(PLAIN, SHORT, out)
    assert not [path for path in (out / "checkpoints").iterdir() if path.name.startswith(".")]
    assert same_weights(made.model, run(PLAIN, SHORT).model)
    assert "damaged" not in capsys.readouterr().err


def test_a_damaged_best_checkpoint_is_not_given_out_as_the_best(tmp_path: Path) -> None:
    recipe = Recipe(
        steps=60, batch=8, rate=3e-2, warmup=0, save_every=3, evaluate_every=2, patience=4, log_every=3, keep=1
    )
    text, held_out = "ab" * 300, "ba cd " * 40 + "xyz" * 60
    whole = run(PLAIN, recipe, tmp_path / "whole", text=text, valid=held_out)
    assert whole.stopped == "early"
    out = tmp_path / "run"
    broken(PLAIN, recipe, out, whole.step - 1, text=text, valid=held_out)
    assert there(out)[0] == whole.best_step < there(out)[-1]
    flip(checkpoint(out, whole.best_step) / "model.safetensors", -2)
    try:
        made = run(PLAIN, recipe, out, text=text, valid=held_out)
    except HeadwiseError as error:
        assert "damaged" in str(error)  # noqa: PT017
    else:
        assert same_weights(made.model, whole.model)


def test_damaged_tokens_and_records_are_told(tmp_path: Path) -> None:
    out = tmp_path / "run"
    broken(PLAIN, SHORT, out, 15)
    good = (out / "tokens" / "train.bin").read_bytes()
    flip(out / "tokens" / "train.bin", 40)
    with pytest.raises(HeadwiseError, match=r"train\.bin is damaged"):
        run(PLAIN, SHORT, out)
    (out / "tokens" / "train.bin").write_bytes(good)
    run(PLAIN, SHORT, out)
    (out / "run.json").write_text("{")
    with pytest.raises(HeadwiseError, match=r"run\.json is damaged"):
        run(PLAIN, SHORT, out)


def test_tokens_that_were_deleted_are_made_anew(tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = replace(SHORT, seed=9)
    broken(PLAIN, recipe, out, 15)
    shutil.rmtree(out / "tokens")
    assert same_weights(run(PLAIN, recipe, out).model, run(PLAIN, recipe).model)


def test_a_broken_last_line_of_the_metrics_is_written_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    broken(PLAIN, SHORT, out, 15)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 15, "lo')
    same_run(run(PLAIN, SHORT, tmp_path / "whole"), run(PLAIN, SHORT, out))
