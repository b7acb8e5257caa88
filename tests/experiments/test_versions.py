"""What the lab keeps is found again after code was moved, renamed or tidied, and not after what decides it was changed."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.experiments import run
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.store import Store
from headwise.experiments.engine.versions import VERSIONS
from headwise.experiments.experiment import Lab, LabSize
from headwise.experiments.registry import find_claims
from headwise.training.recipe import Recipe

KEYS = """
import json, sys
from headwise.experiments.experiment import Lab, LabSize
from headwise.experiments.registry import all_claims
from headwise.experiments.run import _key
from headwise.experiments.engine.store import Store
lab = Lab(Store(sys.argv[1]), size=LabSize(width=16, heads=4, steps=8, batch=4))
print(json.dumps([lab.store.place(lab.point(0)).name, *(_key(claim, lab) for claim in all_claims())]))
"""


def keys(package: Path, folder: Path) -> Any:
    """Of a point and of every claim, as the package in this folder names them."""
    asked = [sys.executable, "-c", KEYS, str(folder)]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=package, env={"PYTHONPATH": str(package)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_moving_and_tidying_code_changes_no_key(tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "headwise"
    shutil.copytree(Path(headwise.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = keys(copy.parent, tmp_path)
    assert len(set(before)) == 28
    (copy / "train" / "stop.py").rename(copy / "train" / "halt.py")
    (copy / "lab" / "experiments" / "claims" / "hill.py").rename(
        copy / "lab" / "experiments" / "claims" / "mountain.py"
    )
    loop = copy / "train" / "loop.py"
    loop.write_text(
        loop.read_text().replace("headwise.training.signals", "headwise.training.halt") + "\n\nTIDIED = (1,\n  2)\n"
    )
    assert keys(copy.parent, tmp_path) == before


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(Store(tmp_path), size=LabSize(width=16, heads=4, steps=8, batch=4))


@pytest.mark.parametrize(("kind", "trained"), [("texts", True), ("training", True), ("measures", False)])
def test_a_declared_version_changes_what_it_decides(
    kind: str, trained: bool, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    (claim,), point = find_claims(["hill"]), lab.point(0)
    before = run._key(claim, lab), lab.store.place(point)
    monkeypatch.setitem(VERSIONS, kind, VERSIONS[kind] + 1)
    fresh = replace(lab, store=Store(lab.store.folder))  # one that remembers no places
    assert run._key(claim, fresh) != before[0]
    assert (fresh.store.place(point) != before[1]) == trained


def test_a_claim_s_own_version_changes_its_key_alone(lab: Lab) -> None:
    (hill,) = find_claims(["hill"])
    assert run._key(replace(hill, version=2), lab) != run._key(hill, lab)


OTHER: dict[str, Any] = {
    "rows": "random", "objective": "causal", "precision": "bfloat16", "compile": True, "checkpointing": True,
    "parallel": "fsdp",
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(Recipe)])
def test_every_number_of_a_recipe_changes_the_key(name: str, lab: Lab) -> None:
    point = lab.point(0)
    now = getattr(point.recipe, name)
    other = OTHER[name] if name in OTHER and OTHER[name] != now else "windows" if name == "rows" else None
    if other is None:
        other = now / 2 if isinstance(now, float) and now else 0.5 if isinstance(now, float) else now + 1
    if name == "accumulate":
        other = 2
    assert lab.store.place(replace(point, recipe=replace(point.recipe, **{name: other}))) != lab.store.place(point)


def test_every_other_part_of_a_point_changes_the_key(lab: Lab, tmp_path: Path) -> None:
    point, text = lab.point(0), tmp_path / "text.txt"
    text.write_text("the dog saw the cat")
    others: dict[str, Any] = {
        "spec": point.spec.resized(width=32), "recipe": replace(point.recipe, seed=9), "start": "twins",
        "text": str(text), "tokenizer": "byte", "watch": (4,),
    }  # fmt: skip
    taught = replace(point, teacher=point, by="logits")  # who teaches and by what go together
    assert {*others, "teacher", "by"} == {field.name for field in fields(Point)}
    ways = [taught, replace(taught, by="maps order"), replace(taught, teacher=replace(point, start="twins"))]
    places = {lab.store.place(replace(point, **{name: other})) for name, other in others.items()}
    assert len(places | {lab.store.place(one) for one in (point, *ways)}) == 10
    assert lab.store.place(replace(point, text=str(text))) in places
    text.write_text("the cat saw the dog")
    assert Store(lab.store.folder).place(replace(point, text=str(text))) not in places, (
        "a file may change under its name"
    )
