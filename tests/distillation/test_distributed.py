"""Two processes that share the batches of a distillation reach the same weights as one process."""

from pathlib import Path

import pytest

import headwise as hw
from tests.distillation.team_script import distill_small_student
from tests.distributed.process_fixtures import WorkerGroup
from tests.training.test_distributed import run_two_processes
from tests.training.tiny import max_weight_difference, same_weights

SCRIPT = "tests.distillation.team_script"


def test_distill_two_processes_equal_one(two: WorkerGroup, tmp_path: Path) -> None:
    results = two.run(f"{SCRIPT}:run_and_summarize", str(tmp_path / "two"))
    for name in ("weight", "loss", "valid"):
        assert results[0][name] == results[1][name], "both processes have the same model"
    single = distill_small_student(None)
    assert results[0]["loss"] == pytest.approx(single.loss, rel=1e-5)
    assert max_weight_difference(single.model, hw.load(tmp_path / "two" / "model")) < 1e-5
    rows = [row for row in single.history if "loss maps" in row]
    assert all({"loss logits", "loss text", "loss hidden", "loss maps", "loss qkv"} <= row.keys() for row in rows)


@pytest.mark.slow
def test_distill_two_processes_resume_bitwise(tmp_path: Path) -> None:
    run_two_processes(str(tmp_path / "whole"), script=SCRIPT)
    run_two_processes(str(tmp_path / "broken"), "5", succeeds=False, script=SCRIPT)
    assert not (tmp_path / "broken" / "model").exists()
    run_two_processes(str(tmp_path / "broken"), script=SCRIPT)
    assert same_weights(*(hw.load(tmp_path / name / "model") for name in ("whole", "broken")))
    states = [tmp_path / name / "checkpoints" / "step-00000006" for name in ("whole", "broken")]
    for name in ("loss.safetensors", "optimizer.safetensors"):
        assert (states[0] / name).read_bytes() == (states[1] / name).read_bytes(), name
