"""headwise train as a person or a program uses it."""

import json
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from tests.runner import alone, headwise

SIZES = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "8", "--batch", "4", "--warmup", "2"]
TEXT = "the dog saw the cat, and the cat ran to the tree.\n" * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return path


def test_json_is_all_that_comes_out(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = headwise("train", text, *SIZES, "--steps", "5", "--evaluate-every", "2", "--out", out, "--json")
    assert done.code == 0, done.err
    told: dict[str, Any] = json.loads(done.out)
    assert told["steps"] == told["recipe"]["steps"] == 5
    assert told["tokens"] == 5 * 4 * 8
    assert told["stopped"] == "finished"
    assert told["exam"] == []
    assert told["model"] == str(out / "model")
    assert 0 < told["loss"] < 7
    assert 0 < told["valid_loss"] < 7
    assert [line.split(":")[0] for line in done.err.splitlines()] == ["step 2", "step 4", "step 5"]
    model = hw.load(out / "model")
    assert told["parameters"] == sum(value.numel() for value in model.parameters())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1] == {"step": 5, "valid_loss": told["valid_loss"]}

    again = headwise("train", text, *SIZES, "--steps", "5", "--evaluate-every", "2", "--out", out, "--json")
    assert json.loads(again.out) | {"seconds": 0} == told | {"seconds": 0}
    assert again.err == "going on from step 5 of 5\n"


def test_for_a_person(text: Path, tmp_path: Path) -> None:
    done = headwise(
        "train", text, *SIZES, "--steps", "3", "--out", tmp_path / "run", "--masked", "--tokenizer", "character"
    )
    assert done.code == 0, done.err
    assert "finished at step 3, 96 tokens" in done.out
    assert f"headwise generate {tmp_path / 'run'} ..." in done.out
    model = hw.load(tmp_path / "run" / "model")
    assert model.spec.kind == "encoder"
    assert model.spec.vocab == len(set(TEXT)) + 3  # with unknown, end and mask


def bad(tmp_path: Path) -> dict[str, list[str | Path]]:
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
        "no file or folder": [tmp_path / "nowhere.txt"],
        "latin.txt, line 2: byte 0xe9 is not UTF-8": [tmp_path / "latin.txt"],
        "empty.txt is empty": [tmp_path / "empty.txt"],
        "fewer than a context": [tmp_path / "short.txt"],
        "not a kind of file": [tmp_path / "photo.png"],
        "no text in the folder": [tmp_path / "folder"],
        "something else": [words, "--out", tmp_path / "full"],
        "no tokenizer 'letters'": [words, "--tokenizer", "letters"],
        "steps must be at least 1": [words, "--steps", "0"],
        "the rate must be above 0": [words, "--rate", "-1"],
        "'float8' is unknown": [words, "--precision", "float8"],
        "'nonsense' cannot be used": [words, "--device", "nonsense"],
        "cannot be shared by 3 heads": [words, "--heads", "3"],
        "cannot be cut into 3": [words, "--accumulate", "3"],
        "tiny-nothing": [words, "--preset", "tiny-nothing"],
        "nowhere.txt": [words, "--valid", tmp_path / "nowhere.txt"],
    }


def test_what_cannot_be_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for message, arguments in bad(tmp_path).items():
        asked = [*SIZES, "--steps", "2", *map(str, arguments)]
        done = headwise("train", *asked)
        assert done.code == 2, message
        assert done.out == ""
        assert message in done.err
        assert done.err.count("\n") == 1, done.err
        assert done.err.startswith("headwise: ")


def test_an_error_of_a_process_is_no_traceback(tmp_path: Path) -> None:
    done = alone("train", tmp_path / "nowhere.txt", "--json")
    assert done.code == 2
    assert done.out == ""
    assert done.err == f"headwise: there is no file or folder {tmp_path / 'nowhere.txt'}.\n"


def test_a_mistake_put_right_goes_through(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that never began has no claim on its folder."""
    asked = [str(text), *SIZES, "--steps", "2", "--out", str(tmp_path / "run")]
    assert headwise("train", *asked, "--tokenizer", "letters").code == 2
    done = headwise("train", *asked, "--tokenizer", "character")
    assert done.code == 0, done.err


def test_a_text_put_right_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "words.txt"
    asked = [str(path), *SIZES, "--steps", "2", "--out", str(tmp_path / "run")]
    for wrong in (b"caf\xe9 " * 200, b"abc"):
        path.write_bytes(wrong)
        assert headwise("train", *asked).code == 2
    path.write_text(TEXT)
    done = headwise("train", *asked)
    assert done.code == 0, done.err


def test_a_text_to_evaluate_on_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a text it is the little language that is read; an own text to evaluate on is then used, or refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("")  # empty: whoever reads it, must complain
    done = headwise("train", "--valid", "other.txt", *SIZES, "--steps", "1")
    assert done.code == 2
    assert "other.txt" in done.err or "--valid" in done.err
