"""Claims run once, results are cached, and claims that cannot run raise an error."""

from dataclasses import replace
from typing import cast

import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.experiments import run_claims
from headwise.experiments.claim import Verdict
from headwise.experiments.engine import train_model
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.registry import all_claims, find_claims
from headwise.experiments.run_claims import claims
from headwise.experiments.trained_model_provider import ExperimentSize
from headwise.spec import AttentionSpec, ModelSpec

TINY = ExperimentSize(width=16, heads=4, steps=8, batch_size=4, documents=20)


@pytest.fixture
def model() -> hw.Transformer:
    torch.manual_seed(0)
    return hw.Transformer(ModelSpec(vocab=257, context=64, layers=2, attention=AttentionSpec(width=16, heads=4)))


def test_find_claims_by_name_and_number():
    assert [claim.number for claim in find_claims(["parameters", "1", "3"])] == [3, 1]
    assert find_claims() == all_claims()


def test_claims_unknown_name_suggests_matches():
    with pytest.raises(HeadwiseError, match="'same-number' does not exist: did you mean same-numbers"):
        claims(["same-number"])
    with pytest.raises(HeadwiseError, match="'77' does not exist: known: "):
        claims(["77"])


def test_claims_cached_results_are_reused(tmp_path, monkeypatch):
    names = ["same-numbers", "parameters"]
    first = claims(names, size=TINY, cache=tmp_path, processes=1)
    assert [result.claim.number for result in first] == [1, 3]
    assert all(result.has_few_seeds for result in first)
    assert first[0].rerun_command == "headwise claims same-numbers"
    monkeypatch.setattr(
        run_claims,
        "run_jobs_as_completed",
        lambda function, jobs, *args, **kwargs: iter([]) if not jobs else pytest.fail("done again"),
    )
    second = claims(names, size=TINY, cache=tmp_path)
    assert [result.to_dict() for result in second] == [result.to_dict() for result in first]


def test_claim_key_depends_on_size_and_seeds(tmp_path):
    (claim,) = find_claims(["parameters"])
    experiment = run_claims.TrainedModelProvider(run_claims.ExperimentStore(tmp_path), (0,), TINY)
    keys = {
        run_claims._result_key(claim, variant)
        for variant in (experiment, replace(experiment, seeds=(0, 1, 2)), replace(experiment, size=ExperimentSize()))
    }
    assert len(keys) == 3


def test_claims_changed_rule_rejudges_cached_statistics(tmp_path, monkeypatch):
    (first,) = claims(["parameters"], size=TINY, cache=tmp_path, processes=1)
    (claim,) = find_claims(["parameters"])
    changed = replace(claim, judge=lambda statistics: Verdict("does not hold"))
    monkeypatch.setattr(run_claims, "find_claims", lambda names=(): (changed,))
    (rejudged,) = claims(["parameters"], size=TINY, cache=tmp_path, processes=1)
    assert first.verdict.word != rejudged.verdict.word
    assert rejudged.statistics.to_rows() == first.statistics.to_rows()


def test_claims_timed_run_in_process_and_are_cached(tmp_path, monkeypatch):
    (claim,) = find_claims(["parameters"])
    calls = []

    def measure(experiment):
        calls.append(experiment.seeds)
        return StatisticTable().add("most over fewest", "plain", 1.0)

    timed = replace(claim, measure=measure, timed=True)
    monkeypatch.setattr(run_claims, "find_claims", lambda names=(): (timed,))
    for _ in range(2):
        (result,) = claims(["parameters"], full=True, size=TINY, cache=tmp_path)
        assert result.verdict.word == "true by construction"
        assert not result.has_few_seeds
        assert result.is_exploratory  # these seeds, while the rules were made
    assert calls == [(0, 1, 2)]
    (result,) = claims(["parameters"], seeds=5, size=TINY, cache=tmp_path)
    assert (calls[1:], result.rerun_command) == ([(0, 1, 2, 3, 4)], "headwise claims parameters --seeds 5")
    with pytest.raises(HeadwiseError, match="cannot be combined"):
        claims(["parameters"], full=True, seeds=5)
    (result,) = claims(["parameters"], seeds=2, first_seed=100, size=TINY, cache=tmp_path)
    assert (calls[2:], result.rerun_command) == ([(100, 101)], "headwise claims parameters --seeds 2 --first-seed 100")
    assert not result.is_exploratory
    with pytest.raises(HeadwiseError, match="Got -1"):
        claims(["parameters"], first_seed=-1)
    with pytest.raises(HeadwiseError, match="models that are trained here"):
        claims(["parameters"], first_seed=3, model="smollm2")


def test_claims_train_on_requested_seeds(tmp_path):
    experiment = run_claims.TrainedModelProvider(run_claims.ExperimentStore(tmp_path), (100, 101, 102, 103), TINY)
    for claim in all_claims():
        assert {config.recipe.seed for config in claim.training_configs(experiment)} <= set(experiment.seeds), (
            claim.name
        )


def test_experiment_texts_and_evaluation_follow_seeds(tmp_path, monkeypatch):
    experiment, other = (
        run_claims.TrainedModelProvider(run_claims.ExperimentStore(tmp_path), seeds, TINY) for seeds in ((0,), (100,))
    )
    shared = [[item.text for item in current.held_out_corpus().items()] for current in (experiment, other)]
    assert not set(shared[0]) & set(shared[1])
    seen_seeds = []
    monkeypatch.setattr(train_model, "synthetic_eval", lambda model, *, documents, seed: seen_seeds.append(seed) or ())
    train_model.evaluate_synthetic(cast(hw.Transformer, None), 7)
    assert seen_seeds == [20_007]


def test_claims_given_model_gives_result(model):
    (result,) = claims(["same-numbers"], model=model)
    assert (result.model_name, result.rerun_command) == ("Transformer", 'claims(["same-numbers"], model=model)')
    assert result.verdict.word == "holds"


def test_claims_training_claim_on_given_model_raises(model):
    with pytest.raises(HeadwiseError, match=r"loss-vs-head-count: cannot be tested on a given model.*same-numbers"):
        claims(["loss-vs-head-count"], model=model)


def test_claims_unsupported_claim_is_skipped_with_message(model, monkeypatch):
    def raise_unsupported(candidate, text):
        raise HeadwiseError("it has no wheels.")

    (claim,) = find_claims(["parameters"])
    monkeypatch.setattr(run_claims, "find_claims", lambda names=(): (replace(claim, measure_model=raise_unsupported),))
    messages = []
    assert claims(model=model, log=messages.append) == []
    assert messages == ["parameters is skipped: it has no wheels."]
    with pytest.raises(HeadwiseError, match="no wheels"):
        claims(["parameters"], model=model)


def test_claim_key_depends_on_installed_packages(tmp_path):
    (claim,) = find_claims(["parameters"])
    experiment = run_claims.TrainedModelProvider(run_claims.ExperimentStore(tmp_path), (0,), TINY)
    assert run_claims._result_key(claim, experiment) != run_claims._result_key(
        replace(claim, extra_key=lambda: "smollm2"), experiment
    )


def test_measure_changed_code_raises(tmp_path):
    with pytest.raises(HeadwiseError, match="changed while the experiment was running"):
        run_claims._measure("parameters", str(tmp_path), (0,), TINY.to_json(), "another key")


def test_claims_model_path_and_text_in_command(tmp_path, model):
    model.save(tmp_path / "a model")
    (result,) = claims(["same-numbers"], model=str(tmp_path / "a model"), corpus="to be")
    assert result.rerun_command == f"headwise claims same-numbers --model '{tmp_path}/a model' --corpus 'to be'"
