"""A custom loss with a teacher, parameters and several terms, interrupted and resumed to bitwise equal weights."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.training import resume
from headwise.training.batch_samplers import TrainBatch
from headwise.training.model_with_loss import LanguageLoss, ModelWithLoss
from tests.training.tiny import PLAIN, SHORT, checkpoint_folder, run, run_interrupted, same_weights


class TeacherLoss(ModelWithLoss):
    """Cross-entropy, and the distance to the states of a wider teacher through a learned projection."""

    name = "taught by a teacher of width 24"

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        self.text = LanguageLoss(model)
        self.teacher = Transformer(PLAIN.resized(width=24)).requires_grad_(False).eval()
        self.map = nn.Linear(model.spec.width, self.teacher.spec.width)

    def compute_loss(self, batch: TrainBatch, total: int | None) -> dict[str, Tensor]:
        difference = self.map(self.model(batch.ids, hidden=True)) - self.teacher(batch.ids, hidden=True)  # (B, T, 24)
        assert total is not None
        return {"text": self.text.compute_loss(batch, total), "teacher": difference.square().mean(-1).sum() / total}


def test_train_default_loss_is_language_loss(tmp_path: Path) -> None:
    explicit = run(PLAIN, SHORT, tmp_path / "given", loss=LanguageLoss)
    assert same_weights(run(PLAIN, SHORT).model, explicit.model)
    assert not (checkpoint_folder(tmp_path / "given", 20) / "loss.safetensors").exists()


def test_train_custom_loss_parameters_learn_teacher_frozen() -> None:
    losses: list[TeacherLoss] = []

    def make_loss(model: Transformer) -> TeacherLoss:
        losses.append(TeacherLoss(model))
        losses[0].before = {name: value.clone() for name, value in losses[0].state_dict().items()}  # pyright: ignore
        return losses[0]

    rows = run(PLAIN, SHORT, loss=make_loss).history
    after, before = losses[0].state_dict(), losses[0].before
    changed = {name for name in after if not torch.equal(after[name], before[name])}  # pyright: ignore
    assert {"map.weight", "map.bias"} <= changed
    assert any(name.startswith("model.") for name in changed)
    assert not any(name.startswith("teacher.") for name in changed)
    logged = [row for row in rows if "loss" in row]
    assert logged[-1]["loss teacher"] < logged[0]["loss teacher"]
    for row in logged:
        assert row["loss"] == pytest.approx(row["loss text"] + row["loss teacher"], rel=1e-6)


def test_train_custom_loss_resumes_bitwise(tmp_path: Path) -> None:
    uninterrupted = run(PLAIN, SHORT, tmp_path / "whole", loss=TeacherLoss)
    run_interrupted(PLAIN, SHORT, tmp_path / "again", 14, loss=TeacherLoss)
    resumed = run(PLAIN, SHORT, tmp_path / "again", loss=TeacherLoss)
    assert same_weights(uninterrupted.model, resumed.model)
    for name in ("loss.safetensors", "optimizer.safetensors"):
        contents = [(checkpoint_folder(tmp_path / folder, 20) / name).read_bytes() for folder in ("whole", "again")]
        assert contents[0] == contents[1], name
    run_interrupted(PLAIN, SHORT, tmp_path / "folder", 14, loss=TeacherLoss)
    assert same_weights(resume(tmp_path / "folder", loss=TeacherLoss, progress=False).model, uninterrupted.model)


def test_resume_different_loss_raises(tmp_path: Path) -> None:
    run_interrupted(PLAIN, SHORT, tmp_path / "run", 14, loss=TeacherLoss)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["loss"] == TeacherLoss.name
    with pytest.raises(HeadwiseError, match="loss was 'taught by a teacher of width 24', now None"):
        run(PLAIN, SHORT, tmp_path / "run")
    with pytest.raises(HeadwiseError, match="loss was 'taught by a teacher of width 24', now None"):
        resume(tmp_path / "run", progress=False)


def test_train_invalid_loss_raises() -> None:
    with pytest.raises(HeadwiseError, match="a function that takes the model"):
        run(PLAIN, SHORT, loss=lambda model: nn.Linear(2, 2))
    with pytest.raises(HeadwiseError, match="a function that takes the model"):
        run(PLAIN, SHORT, loss=lambda model: LanguageLoss(Transformer(PLAIN)))
