"""headwise distil, as a person types it."""

import json
from pathlib import Path

import pytest

import headwise as hw
from tests.runner import headwise
from tests.teach.tiny import make

TEXT = "to be or not to be that is the question " * 40
SHORT = ("--steps", 4, "--batch", 2, "--context", 16, "--warmup", 1)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    make().save(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_a_student_of_a_folder(files: Path) -> None:
    how = ("--layers", 1, "--by", "logits,maps", "--pairs", "0.0:1.1,0.3:0.2", "--out", files / "run", *SHORT, "--json")
    told = json.loads(headwise("distil", files / "teacher", files / "text.txt", *how).told)
    assert told["steps"] == 4
    assert told["parameters"] < told["teacher"]
    assert hw.load(files / "run" / "model").spec.layers == 1
    again = json.loads(headwise("distil", files / "teacher", files / "text.txt", *how).told)
    assert again["loss"] == told["loss"], "a finished run is given as it ended"


def test_a_student_that_is_there(files: Path) -> None:
    make(4).save(files / "student")
    how = ("--student", files / "student", "--out", files / "run", *SHORT)
    told = headwise("distil", files / "teacher", files / "text.txt", *how)
    assert "finished at step 4" in told.told
    wrong = headwise("distil", files / "teacher", files / "text.txt", *how, "--layers", 1)
    assert "for a new student" in wrong.refused
    assert "no loss 'map'" in headwise("distil", files / "teacher", files / "text.txt", "--by", "map").refused
