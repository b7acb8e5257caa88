"""The rule on figures made by hand, and a whole family trained in a moment."""

from dataclasses import replace

import numpy as np
import pytest

from headwise.analysis.similarity.match_heads import match
from headwise.errors import HeadwiseError
from headwise.experiments.claims.distillation import APART, CLAIM, GAP, LOSS, MAPS, NEARER, WAYS, family, measure
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.store import Store
from headwise.experiments.experiment import Lab, LabSize

AT = "logits, beside text"
WORSE, BETTER = [0.05, 0.06, 0.055], [-0.05, -0.06, -0.055]
NEAR, FAR = [0.02, 0.021, 0.022], [-0.001, 0.001, 0.0]
CASES = {
    "holds": [*((GAP, name, WORSE) for name in MAPS), (NEARER, AT, NEAR)],
    "does not hold": [*((GAP, name, BETTER) for name in MAPS), (NEARER, AT, FAR)],
    "depends": [*((GAP, name, WORSE) for name in MAPS), (NEARER, AT, FAR)],
}


def test_students_differ_in_what_they_learn_from_alone(tmp_path) -> None:
    teacher, *students = family(Lab(Store(tmp_path)), 3).values()
    assert [student.by for student in students] == list(WAYS.values())
    assert {replace(student, by="", teacher=None) for student in students} == {students[0]}
    assert all(student.teacher == teacher for student in students[1:])
    assert (teacher.spec.layers, students[0].spec.layers) == (4, 2)
    assert (len(teacher.spec.addresses), len(students[0].spec.addresses)) == (32, 8)
    assert Point.from_json(students[1].to_json()) == students[1]
    assert "teacher" not in students[0].to_json(), "points that have none are named as they were"
    with pytest.raises(HeadwiseError, match="says by what"):
        replace(students[0], by="maps")


def tiny(folder) -> Lab:
    return Lab(Store(folder), (0,), LabSize(width=16, heads=4, steps=8, batch=2, documents=12))


def test_a_student_asks_for_its_teacher(tmp_path) -> None:
    lab = tiny(tmp_path)
    points = family(lab, 0)
    made = lab.made(points["maps, first layers"])
    assert lab.store.made(points["teacher"]) is not None, "it was trained on the way"
    assert made.loss != lab.made(points["text"]).loss


@pytest.mark.slow
def test_a_family_is_trained_and_measured(tmp_path) -> None:
    lab = tiny(tmp_path)
    figures = measure(lab)
    made = {name: lab.made(point) for name, point in family(lab, 0).items()}
    assert figures[LOSS, "qkv"].mean == made["qkv"].loss
    for name in MAPS:
        assert figures[GAP, name].mean == pytest.approx(made[name].loss - made["logits"].loss)
    assert len({one.loss for one in made.values()}) == len(made), "every way gives another model"
    found = match(made["teacher"].model(), made["logits"].model(), lab.documents(), texts=64)
    assert figures[APART, "logits"].mean == pytest.approx(np.mean([one.distance for one in found]))
    assert CLAIM.judge(figures).word in ("holds", "does not hold", "depends")
