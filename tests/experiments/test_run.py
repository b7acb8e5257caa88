"""Claims are run once, whoever asks; what was found is kept; what cannot be run is said."""

from dataclasses import replace
from typing import cast

import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.experiments import run
from headwise.experiments.claim import Verdict
from headwise.experiments.engine import train_model
from headwise.experiments.engine.statistic import Figures
from headwise.experiments.experiment import LabSize
from headwise.experiments.registry import all_claims, find_claims
from headwise.spec import AttentionSpec, ModelSpec

TINY = LabSize(width=16, heads=4, steps=8, batch=4, documents=20)


@pytest.fixture
def model() -> hw.Transformer:
    torch.manual_seed(0)
    return hw.Transformer(ModelSpec(vocab=257, context=64, layers=2, attention=AttentionSpec(width=16, heads=4)))


def test_found_by_name_and_by_number():
    assert [claim.number for claim in find_claims(["parameters", "1", "3"])] == [3, 1]
    assert find_claims() == all_claims()


def test_an_unknown_claim_is_refused_with_the_close_ones():
    with pytest.raises(HeadwiseError, match="no claim 'same-number'; did you mean same-numbers"):
        hw.claims(["same-number"])
    with pytest.raises(HeadwiseError, match="no claim '77'; known: "):
        hw.claims(["77"])


def test_what_was_found_is_not_done_again(tmp_path, monkeypatch):
    asked = ["same-numbers", "parameters"]
    first = hw.claims(asked, size=TINY, cache=tmp_path, processes=1)
    assert [result.claim.number for result in first] == [1, 3]
    assert all(result.indicative for result in first)
    assert first[0].again == "headwise claims same-numbers"
    monkeypatch.setattr(
        run, "work", lambda function, jobs, *more, **named: iter([]) if not jobs else pytest.fail("done again")
    )
    again = hw.claims(asked, size=TINY, cache=tmp_path)
    assert [result.to_dict() for result in again] == [result.to_dict() for result in first]


def test_another_size_or_more_seeds_is_another_experiment(tmp_path):
    (claim,) = find_claims(["parameters"])
    lab = run.Lab(run.Store(tmp_path), (0,), TINY)
    keys = {run._key(claim, one) for one in (lab, replace(lab, seeds=(0, 1, 2)), replace(lab, size=LabSize()))}
    assert len(keys) == 3


def test_a_rule_that_changed_judges_kept_figures_anew(tmp_path, monkeypatch):
    (first,) = hw.claims(["parameters"], size=TINY, cache=tmp_path, processes=1)
    (claim,) = find_claims(["parameters"])
    changed = replace(claim, judge=lambda figures: Verdict("does not hold"))
    monkeypatch.setattr(run, "find_claims", lambda names=(): (changed,))
    (again,) = hw.claims(["parameters"], size=TINY, cache=tmp_path, processes=1)
    assert first.verdict.word != again.verdict.word
    assert again.figures.to_rows() == first.figures.to_rows()


def test_timed_claims_run_here_alone_and_are_kept(tmp_path, monkeypatch):
    (claim,) = find_claims(["parameters"])
    calls = []

    def measure(lab):
        calls.append(lab.seeds)
        return Figures().add("most over fewest", "plain", 1.0)

    timed = replace(claim, measure=measure, timed=True)
    monkeypatch.setattr(run, "find_claims", lambda names=(): (timed,))
    for _ in range(2):
        (made,) = hw.claims(["parameters"], full=True, size=TINY, cache=tmp_path)
        assert made.verdict.word == "true by construction"
        assert not made.indicative
        assert made.seen  # these seeds, while the rules were made
    assert calls == [(0, 1, 2)]
    (made,) = hw.claims(["parameters"], seeds=5, size=TINY, cache=tmp_path)
    assert (calls[1:], made.again) == ([(0, 1, 2, 3, 4)], "headwise claims parameters --seeds 5")
    with pytest.raises(HeadwiseError, match="give one of them"):
        hw.claims(["parameters"], full=True, seeds=5)
    (made,) = hw.claims(["parameters"], seeds=2, first_seed=100, size=TINY, cache=tmp_path)
    assert (calls[2:], made.again) == ([(100, 101)], "headwise claims parameters --seeds 2 --first-seed 100")
    assert not made.seen
    with pytest.raises(HeadwiseError, match="the first one cannot be -1"):
        hw.claims(["parameters"], first_seed=-1)
    with pytest.raises(HeadwiseError, match="there already"):
        hw.claims(["parameters"], first_seed=3, on="smollm2")


def test_every_claim_trains_on_the_seeds_that_were_asked_for(tmp_path):
    lab = run.Lab(run.Store(tmp_path), (100, 101, 102, 103), TINY)
    for claim in all_claims():
        assert {point.recipe.seed for point in claim.points(lab)} <= set(lab.seeds), claim.name


def test_texts_and_exams_follow_the_seeds(tmp_path, monkeypatch):
    lab, other = (run.Lab(run.Store(tmp_path), seeds, TINY) for seeds in ((0,), (100,)))
    shared = [[item.text for item in one.documents().items()] for one in (lab, other)]
    assert not set(shared[0]) & set(shared[1])
    asked = []
    monkeypatch.setattr(train_model, "exam", lambda model, *, documents, seed: asked.append(seed) or ())
    train_model.examine(cast(hw.Transformer, None), 7)
    assert asked == [20_007]


def test_on_a_given_model(model):
    (made,) = hw.claims(["same-numbers"], on=model)
    assert (made.on, made.again) == ("Transformer", 'hw.claims(["same-numbers"], on=model)')
    assert made.verdict.word == "holds"


def test_a_claim_that_trains_models_is_not_tried_on_one(model):
    with pytest.raises(HeadwiseError, match=r"hill cannot be tried on a given model.*same-numbers"):
        hw.claims(["hill"], on=model)


def test_a_claim_that_does_not_fit_a_model_is_left_out_and_said(model, monkeypatch):
    def refuse(given, text):
        raise HeadwiseError("it has no wheels.")

    (claim,) = find_claims(["parameters"])
    monkeypatch.setattr(run, "find_claims", lambda names=(): (replace(claim, on=refuse),))
    told = []
    assert hw.claims(on=model, say=told.append) == []
    assert told == ["parameters is left out: it has no wheels."]
    with pytest.raises(HeadwiseError, match="no wheels"):
        hw.claims(["parameters"], on=model)


def test_what_is_installed_is_part_of_a_key(tmp_path):
    (claim,) = find_claims(["parameters"])
    lab = run.Lab(run.Store(tmp_path), (0,), TINY)
    assert run._key(claim, lab) != run._key(replace(claim, also=lambda: "smollm2"), lab)


def test_code_that_changed_meanwhile_is_refused(tmp_path):
    with pytest.raises(HeadwiseError, match="changed while the lab was at work"):
        run._measure("parameters", str(tmp_path), (0,), TINY.to_json(), "another key")


def test_a_model_of_ones_own_by_name_and_with_a_text(tmp_path, model):
    model.save(tmp_path / "a model")
    (made,) = hw.claims(["same-numbers"], on=str(tmp_path / "a model"), corpus="to be")
    assert made.again == f"headwise claims same-numbers --on '{tmp_path}/a model' --text 'to be'"
