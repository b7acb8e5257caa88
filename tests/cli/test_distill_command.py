"""headwise distill on the command line."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.distillation.distillation_loss import DistillationLoss
from tests.distillation.tiny import make_model
from tests.runner import run_command

TEXT = "to be or not to be that is the question " * 40
SHORT = ("--steps", 4, "--batch-size", 2, "--context", 16, "--warmup", 1)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    make_model().save(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_distill_teacher_folder_trains_student(files: Path) -> None:
    options = (
        "--layers",
        1,
        "--losses",
        "logits, maps=0.5",
        "--head-pairs",
        "0.0:1.1,0.3:0.2",
        "--out",
        files / "run",
        *SHORT,
        "--json",
    )
    result = json.loads(run_command("distill", files / "teacher", files / "text.txt", *options).output)
    assert result["steps"] == 4
    assert result["parameters"] < result["teacher"]
    assert hw.load(files / "run" / "model").spec.layers == 1
    recorded = json.loads(json.loads((files / "run" / "run.json").read_text())["loss"])
    assert recorded["losses"] == {"logits": 1.0, "maps": 0.5}
    second = json.loads(run_command("distill", files / "teacher", files / "text.txt", *options).output)
    assert second["loss"] == result["loss"], "a finished run is given as it ended"


def test_distill_existing_student_and_invalid_options(files: Path) -> None:
    make_model(4).save(files / "student")
    options = ("--student", files / "student", "--out", files / "run", *SHORT)
    done = run_command("distill", files / "teacher", files / "text.txt", *options)
    assert "finished at step 4" in done.output
    wrong = run_command("distill", files / "teacher", files / "text.txt", *options, "--layers", 1)
    assert "for a new student" in wrong.error_line
    assert "Got 'map'" in run_command("distill", files / "teacher", files / "text.txt", "--losses", "map").error_line
    options = ("distill", files / "teacher", files / "text.txt", "--out", files / "wrong", *SHORT)
    assert "the weight is not a number" in run_command(*options, "--losses", "maps=much").error_line
    assert (
        "no head 7.0; it has 0.0 to 1.3"
        in run_command(*options, "--losses", "maps", "--head-pairs", "0.0:7.0").error_line
    )
    assert "not a data type of weights. Got 'int3'" in run_command(*options, "--dtype", "int3").error_line
    assert "not available on this machine" in run_command(*options, "--device", "cuda:77").error_line
    make_model(kind="encoder").save(files / "encoder")
    assert "a teacher of kind decoder" in run_command(*options, "--student", files / "encoder").error_line


def test_distill_layer_and_weight_options_are_recorded(files: Path) -> None:
    """All fields of DistillConfig are options, and the run file records them."""
    command = (
        "distill",
        files / "teacher",
        files / "text.txt",
        "--layers",
        1,
        *SHORT,
        "--losses",
        "hidden,qkv",
        "--ce-weight",
        0.25,
    )
    layer_options = ("--hidden-layers", "0:1", "--relation-layers", "0:0", "--relation-heads", 2)
    assert run_command(*command, *layer_options, "--out", files / "run").code == 0
    recorded = json.loads(json.loads((files / "run" / "run.json").read_text())["loss"])
    assert (recorded["layers"], recorded["relation_layers"], recorded["relation_heads"]) == ([[0, 1]], [0, 0], 2)
    assert recorded["ce_weight"] == 0.25
    wrong = (*command, "--out", files / "wrong")
    assert "Got '0-1'" in run_command(*wrong, "--hidden-layers", "0-1").error_line
    assert "more than one layer pair" in run_command(*wrong, "--relation-layers", "0:0,0:1").error_line
    assert "the weight of the cross-entropy must be" in run_command(*wrong, "--ce-weight", -1).error_line


def test_distill_interrupted_resumes_exactly(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("--layers", 1, "--json", "--steps", 9, *SHORT[2:])
    command = ("distill", files / "teacher", files / "text.txt", *short, "--out")
    uninterrupted = json.loads(run_command(*command, files / "whole").output)
    original_loss, calls = DistillationLoss.compute_loss, []

    def interrupting_loss(self: DistillationLoss, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return original_loss(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(DistillationLoss, "compute_loss", interrupting_loss)
        assert run_command(*command, files / "run").code == 130
    assert len(calls) == 5
    resumed = json.loads(run_command(*command, files / "run").output)
    assert (resumed["loss"], resumed["steps"]) == (uninterrupted["loss"], 9)
