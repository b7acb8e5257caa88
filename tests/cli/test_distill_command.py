"""headwise distil, as a person types it."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.distillation.loss import Distillation
from tests.distillation.tiny import make
from tests.runner import headwise

TEXT = "to be or not to be that is the question " * 40
SHORT = ("--steps", 4, "--batch", 2, "--context", 16, "--warmup", 1)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    make().save(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_a_student_of_a_folder(files: Path) -> None:
    how = (
        "--layers",
        1,
        "--by",
        "logits, maps=0.5",
        "--pairs",
        "0.0:1.1,0.3:0.2",
        "--out",
        files / "run",
        *SHORT,
        "--json",
    )
    told = json.loads(headwise("distil", files / "teacher", files / "text.txt", *how).told)
    assert told["steps"] == 4
    assert told["parameters"] < told["teacher"]
    assert hw.load(files / "run" / "model").spec.layers == 1
    noted = json.loads(json.loads((files / "run" / "run.json").read_text())["loss"])
    assert noted["by"] == {"logits": 1.0, "maps": 0.5}
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
    how = ("distil", files / "teacher", files / "text.txt", "--out", files / "wrong", *SHORT)
    assert "a weight is a number" in headwise(*how, "--by", "maps=much").refused
    assert "no head 7.0; it has 0.0 to 1.3" in headwise(*how, "--by", "maps", "--pairs", "0.0:7.0").refused
    assert "float32 or bfloat16" in headwise(*how, "--teacher-precision", "int3").refused
    make(kind="encoder").save(files / "encoder")
    assert "the teacher of kind decoder" in headwise(*how, "--student", files / "encoder").refused


def test_layers_and_weights_are_chosen(files: Path) -> None:
    """What a lesson can be told in Python it can be told here; the run's own file says what was learned from."""
    how = (
        "distil",
        files / "teacher",
        files / "text.txt",
        "--layers",
        1,
        *SHORT,
        "--by",
        "hidden,qkv",
        "--text-weight",
        0.25,
    )
    chosen = ("--hidden-layers", "0:1", "--relation-layers", "0:0", "--relation-heads", 2)
    assert headwise(*how, *chosen, "--out", files / "run").code == 0
    noted = json.loads(json.loads((files / "run" / "run.json").read_text())["loss"])
    assert (noted["layers"], noted["relation_layers"], noted["relation_heads"]) == ([[0, 1]], [0, 0], 2)
    assert noted["text"] == 0.25
    wrong = (*how, "--out", files / "wrong")
    assert "as in 0:2,1:5; got '0-1'" in headwise(*wrong, "--hidden-layers", "0-1").refused
    assert "in one layer" in headwise(*wrong, "--relation-layers", "0:0,0:1").refused
    assert "must be 0 or more" in headwise(*wrong, "--text-weight", -1).refused


def test_ctrl_c_saves_and_the_same_again_goes_on(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("--layers", 1, "--json", "--steps", 9, *SHORT[2:])
    how = ("distil", files / "teacher", files / "text.txt", *short, "--out")
    whole = json.loads(headwise(*how, files / "whole").told)
    lost, calls = Distillation.lost, []

    def press(self: Distillation, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return lost(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "lost", press)
        assert headwise(*how, files / "run").code == 130
    assert len(calls) == 5
    again = json.loads(headwise(*how, files / "run").told)
    assert (again["loss"], again["steps"]) == (whole["loss"], 9)
