"""A loss that is passed in: a teacher, parameters of its own, several numbers; stopped and resumed to the same bits."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.training import resume
from headwise.training.batches import TokenRows
from headwise.training.loss import LanguageLoss, Loss
from tests.training.tiny import PLAIN, SHORT, broken, checkpoint, run, same_weights


class Taught(Loss):
    """The text's own loss, and how far states are from a wider teacher's behind a map that is learned."""

    name = "taught by a teacher of width 24"

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self.text = LanguageLoss(model)
        self.teacher = Transformer(PLAIN.resized(width=24)).requires_grad_(False).eval()
        self.map = nn.Linear(model.spec.width, self.teacher.spec.width)

    def lost(self, rows: TokenRows, total: int | None) -> dict[str, Tensor]:
        far = self.map(self.model(rows.ids, hidden=True)) - self.teacher(rows.ids, hidden=True)  # (B, T, 24)
        assert total is not None
        return {"text": self.text.lost(rows, total), "teacher": far.square().mean(-1).sum() / total}


def test_the_default_is_the_text(tmp_path: Path) -> None:
    given = run(PLAIN, SHORT, tmp_path / "given", loss=LanguageLoss)
    assert same_weights(run(PLAIN, SHORT).model, given.model)
    assert not (checkpoint(tmp_path / "given", 20) / "loss.safetensors").exists()


def test_all_that_belongs_to_the_loss_learns_and_its_teacher_does_not() -> None:
    made: list[Taught] = []

    def keep(model: Transformer) -> Taught:
        made.append(Taught(model))
        made[0].before = {name: value.clone() for name, value in made[0].state_dict().items()}  # pyright: ignore
        return made[0]

    rows = run(PLAIN, SHORT, loss=keep).history
    after, before = made[0].state_dict(), made[0].before
    changed = {name for name in after if not torch.equal(after[name], before[name])}  # pyright: ignore
    assert {"map.weight", "map.bias"} <= changed
    assert any(name.startswith("model.") for name in changed)
    assert not any(name.startswith("teacher.") for name in changed)
    logged = [row for row in rows if "loss" in row]
    assert logged[-1]["loss teacher"] < logged[0]["loss teacher"]
    for row in logged:
        assert row["loss"] == pytest.approx(row["loss text"] + row["loss teacher"], rel=1e-6)


def test_stopped_and_resumed_is_bitwise_the_same(tmp_path: Path) -> None:
    whole = run(PLAIN, SHORT, tmp_path / "whole", loss=Taught)
    broken(PLAIN, SHORT, tmp_path / "again", 14, loss=Taught)
    again = run(PLAIN, SHORT, tmp_path / "again", loss=Taught)
    assert same_weights(whole.model, again.model)
    for name in ("loss.safetensors", "optimizer.safetensors"):
        sides = [(checkpoint(tmp_path / side, 20) / name).read_bytes() for side in ("whole", "again")]
        assert sides[0] == sides[1], name
    broken(PLAIN, SHORT, tmp_path / "folder", 14, loss=Taught)
    assert same_weights(resume(tmp_path / "folder", loss=Taught, progress=False).model, whole.model)


def test_a_run_keeps_the_loss_it_began_with(tmp_path: Path) -> None:
    broken(PLAIN, SHORT, tmp_path / "run", 14, loss=Taught)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["loss"] == Taught.name
    with pytest.raises(HeadwiseError, match="loss was 'taught by a teacher of width 24', now None"):
        run(PLAIN, SHORT, tmp_path / "run")
    with pytest.raises(HeadwiseError, match="loss was 'taught by a teacher of width 24', now None"):
        resume(tmp_path / "run", progress=False)


def test_what_is_no_loss_of_the_model_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="gives a Loss of it"):
        run(PLAIN, SHORT, loss=lambda model: nn.Linear(2, 2))
    with pytest.raises(HeadwiseError, match="gives a Loss of it"):
        run(PLAIN, SHORT, loss=lambda model: LanguageLoss(Transformer(PLAIN)))
