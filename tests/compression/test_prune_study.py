"""A cut and its judgement in one call, as `headwise prune` makes it; requests; how often weights are hashed."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.compression import plan as plans
from headwise.compression.evaluation import PairedEvaluation
from headwise.compression.prune_request import PruneRequest, PruneWords
from headwise.compression.prune_study import PruneStudy, prune_study
from headwise.errors import HeadwiseError
from tests.compression.test_prune import MODELS, TEXTS, reading, same_weights

MANY = sorted({" ".join([text] * times)[:60] for text in TEXTS for times in range(1, 9)})  # enough to train on


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models whose weights were hashed."""
    asked, digest = [], plans.digest
    monkeypatch.setattr(plans, "digest", lambda model: (asked.append(model), digest(model))[1])
    return asked


def test_the_words_are_the_fields() -> None:
    assert list(PruneWords.__annotations__) == [field.name for field in fields(PruneRequest)]


def test_a_request_is_its_words(hashed: list[Any]) -> None:
    model, request = reading(MODELS["decoder"]), PruneRequest(keep=0.5, on=TEXTS, by="gradient")
    small = hw.prune(model, request)
    assert len(hashed) == 1, "a plan that was just made is not checked against the same weights again"
    assert same_weights(small, hw.prune(model, keep=0.5, on=TEXTS, by="gradient"))
    assert same_weights(small, hw.Plan.make(model, request).apply(model))
    assert len(hashed) == 1 + 1 + 2, "a plan that may have lain in a file is"
    with pytest.raises(HeadwiseError, match="give a PruneRequest alone, or its fields"):
        hw.prune(model, request, fold=False)
    with pytest.raises(HeadwiseError, match=r"not asked for by kep=; did you mean keep\?"):
        hw.prune(model, kep=0.5)  # pyright: ignore[reportCallIssue]


def test_a_study_in_one_call(tmp_path: Path, hashed: list[Any]) -> None:
    model = reading(MODELS["decoder"])
    study = PruneStudy(PruneRequest(keep=0.5, on=MANY), heal=2, seeds=1, shares=(0.5,))
    made = prune_study(model, study, out=tmp_path / "small", save_plan=tmp_path / "plan.json")
    assert len(hashed) == 1
    assert made.model is not None
    assert made.report is not None
    assert made.curve is not None
    choosing, judging = Reading.of(model, MANY).halves()
    bare = hw.prune(model, keep=0.5, on=choosing)
    assert made.model.spec == bare.spec
    assert not same_weights(made.model, bare), "it is healed"
    assert same_weights(hw.load(tmp_path / "small", dtype=None), made.model)
    trial = PairedEvaluation.of(model, judging)
    assert made.report.loss_after.mean == pytest.approx(trial.losses(bare).sum() / trial.counts.sum(), abs=1e-6)
    hashed.clear()
    again = prune_study(model, PruneStudy(PruneRequest(on=MANY), hw.Plan.load(tmp_path / "plan.json"), seeds=1))
    assert len(hashed) == 1
    assert again.plan == made.plan
    assert again.model is not None
    assert same_weights(again.model, bare)


def test_a_study_says_what_is_cut_in_one_way(tmp_path: Path) -> None:
    model = reading(MODELS["decoder"])
    plan = hw.Plan.make(model, cut="0.1", fold=False)
    for asked in ({}, {"request": PruneRequest(keep=0.5), "plan": plan}):
        with pytest.raises(HeadwiseError, match="say which heads go, in one way"):
            PruneStudy(**asked)
    with pytest.raises(HeadwiseError, match="say which heads go, in one way"):
        prune_study(model, PruneStudy(PruneRequest(on=TEXTS), shares=(0.5,)), out=tmp_path / "small")
    with pytest.raises(HeadwiseError, match="heal trains a model that was cut"):
        PruneStudy(shares=(0.5,), heal=3)
