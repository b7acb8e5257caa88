"""Two processes share each batch of a distillation and end where one would."""

from pathlib import Path

import pytest

import headwise as hw
from tests.distillation.team_script import run
from tests.distributed.process_fixtures import Crew
from tests.training.test_distributed import team
from tests.training.tiny import distance, same_weights

SCRIPT = "tests.distillation.team_script"


def test_two_share_a_batch_and_end_where_one_does(two: Crew, tmp_path: Path) -> None:
    told = two.run(f"{SCRIPT}:tell", str(tmp_path / "two"))
    for name in ("weight", "loss", "valid"):
        assert told[0][name] == told[1][name], "both hold the same model"
    one = run(None)
    assert told[0]["loss"] == pytest.approx(one.loss, rel=1e-5)
    assert distance(one.model, hw.load(tmp_path / "two" / "model")) < 1e-5
    rows = [row for row in one.history if "loss maps" in row]
    assert all({"loss logits", "loss text", "loss hidden", "loss maps", "loss qkv"} <= row.keys() for row in rows)


@pytest.mark.slow
def test_two_resume_to_the_same_bits(tmp_path: Path) -> None:
    team(str(tmp_path / "whole"), script=SCRIPT)
    team(str(tmp_path / "broken"), "5", good=False, script=SCRIPT)
    assert not (tmp_path / "broken" / "model").exists()
    team(str(tmp_path / "broken"), script=SCRIPT)
    assert same_weights(*(hw.load(tmp_path / name / "model") for name in ("whole", "broken")))
    states = [tmp_path / name / "checkpoints" / "step-00000006" for name in ("whole", "broken")]
    for name in ("loss.safetensors", "optimizer.safetensors"):
        assert (states[0] / name).read_bytes() == (states[1] / name).read_bytes(), name
