"""headwise train, as tables and as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from tests.runner import run_command, run_in_subprocess

SIZES = ["--layers", "1", "--num-heads", "2", "--width", "16", "--context", "8", "--batch-size", "4", "--warmup", "2"]
TEXT = "the dog saw the cat, and the cat ran to the tree.\n" * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return path


def test_train_json_output_and_metrics(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run_command("train", text, *SIZES, "--steps", "5", "--evaluate-every", "2", "--out", out, "--json")
    assert done.code == 0, done.err
    result: dict[str, Any] = json.loads(done.out)
    assert result["steps"] == result["recipe"]["steps"] == 5
    assert result["tokens"] == 5 * 4 * 8
    assert result["stop_reason"] == "finished"
    assert result["synthetic_eval"] == []
    assert result["model"] == str(out / "model")
    assert 0 < result["loss"] < 7
    assert 0 < result["valid_loss"] < 7
    assert [line.split(":")[0] for line in done.err.splitlines()] == ["step 2", "step 4", "step 5"]
    model = hw.load(out / "model")
    assert result["parameters"] == sum(value.numel() for value in model.parameters())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1] == {"step": 5, "valid_loss": result["valid_loss"]}

    second = run_command("train", text, *SIZES, "--steps", "5", "--evaluate-every", "2", "--out", out, "--json")
    assert json.loads(second.out) | {"seconds": 0} == result | {"seconds": 0}
    assert second.err == "resuming from step 5 of 5\n"


def test_train_text_output_names_next_command(text: Path, tmp_path: Path) -> None:
    done = run_command(
        "train", text, *SIZES, "--steps", "3", "--out", tmp_path / "run", "--masked", "--tokenizer", "character"
    )
    assert done.code == 0, done.err
    assert "finished at step 3: 96 tokens" in done.out
    assert f"headwise generate {tmp_path / 'run'} ..." in done.out
    model = hw.load(tmp_path / "run" / "model")
    assert model.spec.kind == "encoder"
    assert model.spec.vocab == len(set(TEXT)) + 3  # plus unknown, end and mask tokens


def invalid_arguments(tmp_path: Path) -> dict[str, list[str | Path]]:
    (tmp_path / "words.txt").write_text(TEXT)
    (tmp_path / "latin.txt").write_bytes(b"one\ncaf\xe9\n" * 30)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear all")
    words = tmp_path / "words.txt"
    return {
        "file or folder not found": [tmp_path / "nowhere.txt"],
        "latin.txt, line 2: byte 0xe9 is not UTF-8": [tmp_path / "latin.txt"],
        "empty.txt: the file is empty": [tmp_path / "empty.txt"],
        "needs at least": [tmp_path / "short.txt"],
        "format is not supported": [tmp_path / "photo.png"],
        "no text in the folder": [tmp_path / "folder"],
        "but no training run": [words, "--out", tmp_path / "full"],
        "tokenizer: unknown name. Got 'letters'": [words, "--tokenizer", "letters"],
        "steps: must be at least 1": [words, "--steps", "0"],
        "learning_rate above 0": [words, "--learning-rate", "-1"],
        "precision: unknown value. Got 'float8'": [words, "--precision", "float8"],
        "device: unknown, or not available": [words, "--device", "nonsense"],
        "not divisible by heads=3": [words, "--num-heads", "3"],
        "Use a divisor of batch_size": [words, "--accumulation-steps", "3"],
        "tiny-nothing": [words, "--preset", "tiny-nothing"],
        "nowhere.txt": [words, "--valid", tmp_path / "nowhere.txt"],
    }


def test_train_invalid_arguments_print_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for message, arguments in invalid_arguments(tmp_path).items():
        options = [*SIZES, "--steps", "2", *map(str, arguments)]
        done = run_command("train", *options)
        assert done.code == 2, message
        assert done.out == ""
        assert message in done.err
        assert done.err.count("\n") == 1, done.err
        assert done.err.startswith("headwise: ")


def test_train_subprocess_error_has_no_traceback(tmp_path: Path) -> None:
    done = run_in_subprocess("train", tmp_path / "nowhere.txt", "--json")
    assert done.code == 2
    assert done.out == ""
    assert done.err == f"headwise: {tmp_path / 'nowhere.txt'}: file or folder not found. Check the path.\n"


def test_train_corrected_option_reuses_folder(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that did not start does not reserve its folder."""
    options = [str(text), *SIZES, "--steps", "2", "--out", str(tmp_path / "run")]
    assert run_command("train", *options, "--tokenizer", "letters").code == 2
    done = run_command("train", *options, "--tokenizer", "character")
    assert done.code == 0, done.err


def test_train_corrected_text_reuses_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "words.txt"
    options = [str(path), *SIZES, "--steps", "2", "--out", str(tmp_path / "run")]
    for wrong in (b"caf\xe9 " * 200, b"abc"):
        path.write_bytes(wrong)
        assert run_command("train", *options).code == 2
    path.write_text(TEXT)
    done = run_command("train", *options)
    assert done.code == 0, done.err


def test_train_empty_valid_text_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the synthetic language as corpus, --valid is used or raises an error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("")  # empty, so reading it must raise
    done = run_command("train", "--valid", "other.txt", *SIZES, "--steps", "1")
    assert done.code == 2
    assert "other.txt" in done.err or "--valid" in done.err
