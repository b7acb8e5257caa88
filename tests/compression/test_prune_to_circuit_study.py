"""From a circuit to a model: the pruned model does the task, and a random plan with as many heads per layer does not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.analysis.circuits.circuit_result import CircuitResult
from headwise.compression.prune_to_circuit_study import CircuitPruningResult, circuit_study, plan_circuit
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from tests.analysis.constructed_heads import FILLERS, decoder
from tests.analysis.test_circuits import word_pairs

TEXTS = [f"{a} {b} {c} {a} {b}" for a, b, c in zip(FILLERS, FILLERS[3:], FILLERS[7:], strict=False)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return decoder()


@pytest.fixture(scope="module")
def circuit(model: Transformer) -> CircuitResult:
    prompts = word_pairs(32, words=FILLERS[1::2])
    return hw.find_circuit(model, prompts, random_sets=0, alternative=False, progress=False)


@pytest.fixture(scope="module")
def study(model: Transformer, circuit: CircuitResult) -> CircuitPruningResult:
    return circuit_study(model, circuit, TEXTS, random_plans=3, progress=False)


def test_circuit_study_of_induction_circuit_keeps_the_task(study: CircuitPruningResult) -> None:
    full, pruned, random = study.rows
    assert (full.name, full.heads, full.accuracy) == ("full", 12, 1)
    assert (pruned.name, pruned.heads, pruned.accuracy) == ("circuit", 2, 1)
    assert pruned.metric.value > 0.9 * full.metric.value, "without the other heads, the final norm scales the logits up"
    assert pruned.parameters < full.parameters
    assert random.heads == 2
    assert random.accuracy < 1
    assert random.metric.value < 0.7 * pruned.metric.value
    assert full.loss_increase.value == 0
    assert random.loss_increase.low <= random.loss_increase.value <= random.loss_increase.high


@torch.no_grad()
def test_circuit_study_model_equals_applied_plan(
    study: CircuitPruningResult, model: Transformer, tmp_path: Path
) -> None:
    applied = hw.apply(study.plan, model)
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(TEXTS[0])])
    assert torch.equal(applied(ids), study.model(ids))
    assert [str(head) for head in applied.spec.head_addresses] == ["0.0", "1.0"]
    applied.save(tmp_path / "small")
    assert torch.equal(hw.load(tmp_path / "small")(ids), applied(ids))


def test_circuit_study_prints_and_writes_json(study: CircuitPruningResult, tmp_path: Path) -> None:
    assert "circuit" in repr(study)
    assert "<table" in study._repr_html_()
    data = json.loads(study.to_json(tmp_path / "study.json"))
    assert [row["name"] for row in data["rows"]] == ["full", "circuit", "random"]
    assert len(data["pruned_heads"]) == 10


def test_circuit_study_recovers_circuit_and_random_plans(model: Transformer, circuit: CircuitResult) -> None:
    result = circuit_study(
        model, circuit, TEXTS, recover_on="\n\n".join(TEXTS * 20), recover_steps=2, random_plans=1, batch_size=2, context=5,
        progress=False,
    )  # fmt: skip
    assert [row.name for row in result.rows[3:]] == ["circuit recovered", "random recovered"]
    assert result.rows[3].loss_increase != result.rows[1].loss_increase


def test_plan_circuit_accepts_names_and_folds_on_request(model: Transformer) -> None:
    plan = plan_circuit(model, ["0.0", "1.0", "mlp.1", "embedding"])
    assert len(plan.pruned_heads) == 10
    assert not plan.folded_biases
    assert plan_circuit(model, ["0.0", "1.0"], corpus=TEXTS).folded_biases


def test_circuit_study_invalid_arguments_raise(model: Transformer, circuit: CircuitResult) -> None:
    with pytest.raises(HeadwiseError, match=r"needs at least one query head of the model.*Got mlp\.1"):
        plan_circuit(model, ["mlp.1"])
    with pytest.raises(HeadwiseError, match="contains all heads"):
        plan_circuit(model, list(map(str, model.spec.head_addresses)))
    with pytest.raises(HeadwiseError, match="no judged prompts"):
        circuit_study(model, replace(circuit, examples=()), TEXTS, progress=False)
    with pytest.raises(HeadwiseError, match="must be at least 1 and 0"):
        circuit_study(model, circuit, TEXTS, random_plans=0, progress=False)
