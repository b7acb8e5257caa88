"""The rule on figures made by hand, and a whole family trained in a moment."""

from dataclasses import replace

import numpy as np
import pytest

from headwise.analysis.similarity.match_heads import match_heads
from headwise.errors import HeadwiseError
from headwise.experiments.claim_tests.logits_align_heads import (
    APPROACH,
    CLAIM,
    DISTANCE,
    GAP,
    LOSS,
    MAP_PAIRINGS,
    STUDENT_LOSSES,
    measure,
    teacher_and_student_configs,
)
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.trained_model_provider import ExperimentSize, TrainedModelProvider

LOGITS_BESIDE_TEXT = "logits, beside text"
WORSE, BETTER = [0.05, 0.06, 0.055], [-0.05, -0.06, -0.055]
NEAR, FAR = [0.02, 0.021, 0.022], [-0.001, 0.001, 0.0]
CASES = {
    "holds": [*((GAP, name, WORSE) for name in MAP_PAIRINGS), (APPROACH, LOGITS_BESIDE_TEXT, NEAR)],
    "does not hold": [*((GAP, name, BETTER) for name in MAP_PAIRINGS), (APPROACH, LOGITS_BESIDE_TEXT, FAR)],
    "depends": [*((GAP, name, WORSE) for name in MAP_PAIRINGS), (APPROACH, LOGITS_BESIDE_TEXT, FAR)],
}


def test_teacher_and_students_differ_only_in_loss(tmp_path) -> None:
    teacher, *students = teacher_and_student_configs(TrainedModelProvider(ExperimentStore(tmp_path)), 3).values()
    assert [student.distill_losses for student in students] == list(STUDENT_LOSSES.values())
    assert {replace(student, distill_losses="", teacher=None) for student in students} == {students[0]}
    assert all(student.teacher == teacher for student in students[1:])
    assert (teacher.spec.layers, students[0].spec.layers) == (4, 2)
    assert (len(teacher.spec.head_addresses), len(students[0].spec.head_addresses)) == (32, 8)
    assert ExperimentConfig.from_json(students[1].to_json()) == students[1]
    assert "teacher" not in students[0].to_json(), "points that have none are named as they were"
    with pytest.raises(HeadwiseError, match="must be set together"):
        replace(students[0], distill_losses="maps")


def make_tiny_experiment(folder) -> TrainedModelProvider:
    return TrainedModelProvider(
        ExperimentStore(folder), (0,), ExperimentSize(width=16, heads=4, steps=8, batch_size=2, documents=12)
    )


def test_trained_student_trains_its_teacher_first(tmp_path) -> None:
    experiment = make_tiny_experiment(tmp_path)
    configs = teacher_and_student_configs(experiment, 0)
    trained = experiment.train_or_load(configs["maps, first layers"])
    assert experiment.store.load_trained(configs["teacher"]) is not None, "it was trained on the way"
    assert trained.loss != experiment.train_or_load(configs["text"]).loss


@pytest.mark.slow
def test_distillation_tiny_experiment_gives_statistics(tmp_path) -> None:
    experiment = make_tiny_experiment(tmp_path)
    statistics = measure(experiment)
    trained = {
        name: experiment.train_or_load(config) for name, config in teacher_and_student_configs(experiment, 0).items()
    }
    assert statistics[LOSS, "qkv"].mean == trained["qkv"].loss
    for name in MAP_PAIRINGS:
        assert statistics[GAP, name].mean == pytest.approx(trained[name].loss - trained["logits"].loss)
    assert len({student.loss for student in trained.values()}) == len(trained), "every way gives another model"
    matches = match_heads(
        trained["teacher"].load_model(), trained["logits"].load_model(), experiment.held_out_corpus(), max_texts=64
    )
    assert statistics[DISTANCE, "logits"].mean == pytest.approx(np.mean([student.distance for student in matches]))
    assert CLAIM.judge(statistics).word in ("holds", "does not hold", "depends")
