"""Store keys do not change when code is moved or renamed, and change with settings and declared versions."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import headwise
from headwise.experiments import run_claims
from headwise.experiments.engine.declared_code_versions import VERSIONS
from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.experiment_store import ExperimentStore
from headwise.experiments.registry import find_claims
from headwise.experiments.trained_model_provider import ExperimentSize, TrainedModelProvider
from headwise.training.recipe import Recipe

KEYS_SCRIPT = """
import json, sys
from headwise.experiments.trained_model_provider import TrainedModelProvider, ExperimentSize
from headwise.experiments.registry import all_claims
from headwise.experiments.run_claims import _result_key
from headwise.experiments.engine.experiment_store import ExperimentStore
experiment = TrainedModelProvider(ExperimentStore(sys.argv[1]), size=ExperimentSize(width=16, heads=4, steps=8, batch_size=4))
folder = experiment.store.folder_of(experiment.make_config(0))
print(json.dumps([folder.name, *(_result_key(claim, experiment) for claim in all_claims())]))
"""


def read_keys(package: Path, folder: Path) -> Any:
    """Return the keys of one run and of every claim, computed by the package in this folder."""
    command = [sys.executable, "-c", KEYS_SCRIPT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=package, env={"PYTHONPATH": str(package)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_store_keys_unchanged_by_moved_code(tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "headwise"
    shutil.copytree(Path(headwise.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = read_keys(copy.parent, tmp_path)
    assert len(set(before)) == 28
    (copy / "training" / "stop_signals.py").rename(copy / "training" / "halt.py")
    claims_folder = copy / "experiments" / "claim_tests"
    (claims_folder / "loss_vs_head_count.py").rename(claims_folder / "mountain.py")
    loop = copy / "training" / "loop.py"
    loop.write_text(
        loop.read_text().replace("headwise.training.stop_signals", "headwise.training.halt")
        + "\n\nTIDIED = (1,\n  2)\n"
    )
    assert read_keys(copy.parent, tmp_path) == before


@pytest.fixture
def experiment(tmp_path: Path) -> TrainedModelProvider:
    return TrainedModelProvider(
        ExperimentStore(tmp_path), size=ExperimentSize(width=16, heads=4, steps=8, batch_size=4)
    )


@pytest.mark.parametrize(("kind", "trained"), [("texts", True), ("training", True), ("metrics", False)])
def test_store_keys_change_with_declared_version(
    kind: str, trained: bool, experiment: TrainedModelProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    (claim,), config = find_claims(["loss-vs-head-count"]), experiment.make_config(0)
    before = run_claims._result_key(claim, experiment), experiment.store.folder_of(config)
    monkeypatch.setitem(VERSIONS, kind, VERSIONS[kind] + 1)
    fresh = replace(experiment, store=ExperimentStore(experiment.store.folder))  # without memoized folders
    assert run_claims._result_key(claim, fresh) != before[0]
    assert (fresh.store.folder_of(config) != before[1]) == trained


def test_claim_key_changes_with_claim_version(experiment: TrainedModelProvider) -> None:
    (hill,) = find_claims(["loss-vs-head-count"])
    assert run_claims._result_key(replace(hill, version=99), experiment) != run_claims._result_key(hill, experiment)


OTHER_VALUES: dict[str, Any] = {
    "rows": "random", "objective": "causal", "precision": "bfloat16", "compile": True, "checkpointing": True,
    "parallel": "fsdp",
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(Recipe)])
def test_store_key_changes_with_every_recipe_field(name: str, experiment: TrainedModelProvider) -> None:
    config = experiment.make_config(0)
    current = getattr(config.recipe, name)
    other = (
        OTHER_VALUES[name]
        if name in OTHER_VALUES and OTHER_VALUES[name] != current
        else "windows"
        if name == "rows"
        else None
    )
    if other is None:
        other = (
            current / 2
            if isinstance(current, float) and current
            else 0.5
            if isinstance(current, float)
            else current + 1
        )
    if name == "accumulation_steps":
        other = 2
    assert experiment.store.folder_of(
        replace(config, recipe=replace(config.recipe, **{name: other}))
    ) != experiment.store.folder_of(config)


def test_store_key_changes_with_every_config_field(experiment: TrainedModelProvider, tmp_path: Path) -> None:
    config, text = experiment.make_config(0), tmp_path / "text.txt"
    text.write_text("the dog saw the cat")
    others: dict[str, Any] = {
        "spec": config.spec.resized(width=32), "recipe": replace(config.recipe, seed=9), "init": "twins",
        "text": str(text), "tokenizer": "byte", "checkpoint_steps": (4,),
    }  # fmt: skip
    distilled = replace(config, teacher=config, distill_losses="logits")  # teacher and losses must be set together
    assert {*others, "teacher", "distill_losses"} == {field.name for field in fields(ExperimentConfig)}
    variants = [
        distilled,
        replace(distilled, distill_losses="maps order"),
        replace(distilled, teacher=replace(config, init="twins")),
    ]
    folders = {experiment.store.folder_of(replace(config, **{name: other})) for name, other in others.items()}
    assert len(folders | {experiment.store.folder_of(variant) for variant in (config, *variants)}) == 10
    assert experiment.store.folder_of(replace(config, text=str(text))) in folders
    text.write_text("the cat saw the dog")
    assert ExperimentStore(experiment.store.folder).folder_of(replace(config, text=str(text))) not in folders, (
        "a file may change under its name"
    )
