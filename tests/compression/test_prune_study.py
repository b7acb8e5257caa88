"""Prune studies: pruning and evaluation in one call, request fields, and the number of weight digests."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.compression import plan as plans
from headwise.compression.paired_evaluation import PairedEvaluator
from headwise.compression.prune_request import PruneRequest
from headwise.compression.prune_study import PruneStudy, prune_study
from headwise.errors import HeadwiseError
from headwise.model import weights_digest
from tests.compression.test_prune import MODELS, TEXTS, character_model, same_weights

MANY_TEXTS = sorted({" ".join([text] * times)[:60] for text in TEXTS for times in range(1, 9)})  # enough for training


@pytest.fixture
def hashed_models(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the models whose weights were hashed."""
    models, digest = [], weights_digest.weights_digest
    for module in (plans, weights_digest):
        monkeypatch.setattr(
            module, "weights_digest", lambda model, *args: (models.append(model), digest(model, *args))[1]
        )
    return models


def test_prune_parameters_match_request_fields() -> None:
    """The keyword parameters of `hw.prune` are the fields of a request, with their defaults."""
    parameters = dict(inspect.signature(hw.prune).parameters)
    for name in ("model", "progress"):
        parameters.pop(name)
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        field.name: field.default for field in fields(PruneRequest)
    }


def test_prune_request_equals_keyword_arguments(hashed_models: list[Any]) -> None:
    model, request = character_model(MODELS["decoder"]), PruneRequest(keep=0.5, corpus=TEXTS, ranking="gradient")
    small = hw.prune(model, keep=0.5, corpus=TEXTS, ranking="gradient")
    assert len(hashed_models) == 1, "a new plan is not checked against the same weights again"
    assert same_weights(small, hw.apply(hw.plan_pruning(model, request), model))
    assert len(hashed_models) == 1 + 2, "a plan that may come from a file is checked"
    with pytest.raises(TypeError, match="kep"):
        hw.prune(model, kep=0.5)  # pyright: ignore[reportCallIssue]


def test_prune_study_saves_model_plan_report_and_curve(tmp_path: Path, hashed_models: list[Any]) -> None:
    model = character_model(MODELS["decoder"])
    study = PruneStudy(PruneRequest(keep=0.5, corpus=MANY_TEXTS), recover_steps=2, seeds=1, fractions=(0.5,))
    result = prune_study(model, study, out=tmp_path / "small", save_plan=tmp_path / "plan.json")
    assert len(hashed_models) == 1
    assert result.model is not None
    assert result.report is not None
    assert result.curve is not None
    selection, evaluation = TokenizedCorpus.of(model, MANY_TEXTS).halves()
    pruned = hw.prune(model, keep=0.5, corpus=selection)
    assert result.model.spec == pruned.spec
    assert not same_weights(result.model, pruned), "recovery changed the weights"
    assert same_weights(hw.load(tmp_path / "small", dtype=None), result.model)
    trial = PairedEvaluator.of(model, evaluation)
    assert result.report.loss_after.mean == pytest.approx(
        trial.losses_per_text(pruned).sum() / trial.counts.sum(), abs=1e-6
    )
    hashed_models.clear()
    reapplied = prune_study(
        model, PruneStudy(PruneRequest(corpus=MANY_TEXTS), hw.Plan.load(tmp_path / "plan.json"), seeds=1)
    )
    assert len(hashed_models) == 1
    assert reapplied.plan == result.plan
    assert reapplied.model is not None
    assert same_weights(reapplied.model, pruned)


def test_prune_study_conflicting_arguments_raise(tmp_path: Path) -> None:
    model = character_model(MODELS["decoder"])
    plan = hw.plan_pruning(model, PruneRequest(heads="0.1", fold_mean=False))
    for arguments in ({}, {"request": PruneRequest(keep=0.5), "plan": plan}):
        with pytest.raises(HeadwiseError, match="which heads to prune"):
            PruneStudy(**arguments)
    with pytest.raises(HeadwiseError, match="which heads to prune"):
        prune_study(model, PruneStudy(PruneRequest(corpus=TEXTS), fractions=(0.5,)), out=tmp_path / "small")
    with pytest.raises(HeadwiseError, match="0 if no heads are pruned"):
        PruneStudy(fractions=(0.5,), recover_steps=3)
