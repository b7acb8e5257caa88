"""Plans: made, printed, saved, and applied only to the model that they were made for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.analysis.ablation.ablate import ablated, mean_activations
from headwise.compression import PruneRequest
from headwise.compression.plan import apply, plan_pruning, prune
from headwise.compression.quantize import quantize
from headwise.errors import HeadwiseError
from headwise.model.weights_digest import weights_digest
from headwise.spec import Plan
from headwise.spec.plan import FoldedBias
from headwise.text.corpus import Corpus
from headwise.weights import load
from tests.analysis.models import TEXTS, character_model
from tests.contract.layers import MODELS, assert_equal, make_model, token_ids
from tests.training.tiny import same_weights


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, cut", "encoder"])
@pytest.mark.parametrize("fold_mean", [True, False])
def test_plan_save_load_apply_equals_prune(name: str, fold_mean: bool, tmp_path: Path) -> None:
    model = character_model(MODELS[name]).float()
    plan = plan_pruning(model, PruneRequest(keep=0.5, corpus=TEXTS, fold_mean=fold_mean))
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    pruned, applied = prune(model, keep=0.5, corpus=TEXTS, fold_mean=fold_mean), apply(loaded, model)
    assert applied.spec == pruned.spec
    assert same_weights(pruned, applied)
    assert len(plan.pruned_heads) == len(model.spec.head_addresses) // 2
    assert len(plan.scores) == len(model.spec.head_addresses)
    assert bool(plan.folded_biases) == fold_mean


@pytest.mark.parametrize("name", ["decoder, windows", "encoder"])
@pytest.mark.parametrize("rounds", [1, 3])
@torch.no_grad()
def test_plan_fold_mean_rounds_equals_mean_ablation(name: str, rounds: int) -> None:
    model, ids = character_model(MODELS[name]), token_ids(3, 7)
    plan = plan_pruning(model, PruneRequest(keep=0.4, corpus=TEXTS, rounds=rounds))
    with ablated(model, plan.pruned_addresses, "mean", means=mean_activations(model, TEXTS)):
        assert_equal(apply(plan, model)(ids), model(ids), 1e-9)


@torch.no_grad()
def test_plan_without_fold_mean_equals_silencing() -> None:
    model, ids = character_model(MODELS["decoder"]), token_ids(3, 7)
    plan = plan_pruning(model, PruneRequest(heads="0.1,1.*", fold_mean=False))
    assert (plan.ranking, plan.scores, plan.folded_biases, plan.pruned_heads) == (
        "named",
        (),
        (),
        ("0.1", "1.0", "1.1", "1.2", "1.3"),
    )
    with model.heads["0.1,1.*"].silenced():
        assert_equal(apply(plan, model)(ids), model(ids), 1e-9)


def test_plan_str_lists_pruned_heads() -> None:
    model = character_model(MODELS["decoder"])
    assert str(plan_pruning(model, PruneRequest(heads="0.1,1.*", corpus=TEXTS))).splitlines() == [
        "5 of 8 heads are pruned, named by hand; their mean outputs are folded into biases.",
        f"  on a list of {len(TEXTS)} texts ({Corpus.of(TEXTS).fingerprint[:12]})",
        "  layer 0 loses 1",
        "  layer 1 loses 0 1 2 3 (all heads)",
    ]
    assert "0.1" in repr(plan_pruning(model, PruneRequest(heads="0.1", fold_mean=False)))


def test_plan_json_keeps_numbers_bitwise() -> None:
    plan = plan_pruning(character_model(MODELS["decoder"]), PruneRequest(heads="0.1", corpus=TEXTS))
    assert Plan.from_json(plan.to_json()).folded_biases[0].bias == plan.folded_biases[0].bias
    assert len(plan.folded_biases) == 1
    assert len(plan.folded_biases[0].bias) == plan.spec.width


def test_plan_apply_other_model_raises() -> None:
    model = character_model(MODELS["decoder"])
    plan = plan_pruning(model, PruneRequest(heads="0.1", corpus=TEXTS))
    other: Any
    for other, message in (
        (make_model(replace(model.spec, layers=3)), "8 heads in 2 layers.*This model has 12 heads in 3 layers"),
        (make_model(model.spec, seed=1), "other weights"),
        (character_model(MODELS["decoder"]).float(), "another dtype"),
        (apply(plan, model), "This model has 7 heads"),
        ("smollm2", "Got str"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            apply(plan, other)
    assert (
        apply(plan, character_model(MODELS["decoder"])).spec.head_addresses == plan.spec.without("0.1").head_addresses
    )


def test_plan_load_damaged_file_raises(tmp_path: Path) -> None:
    plan = plan_pruning(character_model(MODELS["decoder"]), PruneRequest(keep=0.5, corpus=TEXTS))
    with pytest.raises(HeadwiseError, match="could not be read"):
        Plan.load(tmp_path / "nowhere.json")
    text = plan.to_json()
    for damaged, message in (
        (text[:100], "not valid JSON"),
        (json.dumps(json.loads(text) | {"colour": 1}), "unknown field 'colour'"),
        (json.dumps(json.loads(text) | {"pruned_heads": ["7.7"]}), "not have head 7.7"),
        (json.dumps(json.loads(text) | {"scores": [1.0]}), "1 scores for 8 heads"),
        (json.dumps(json.loads(text) | {"pruned_heads": ["0.1", "0.1"]}), "twice"),
        (json.dumps(json.loads(text) | {"digest": 3}), "must be str"),
        (json.dumps(json.loads(text) | {"format": 3}), "has format 3"),
        ("[]", "must be a JSON object"),
    ):
        (tmp_path / "plan.json").write_text(damaged)
        with pytest.raises(HeadwiseError, match=message):
            Plan.load(tmp_path / "plan.json")
    for folded in (
        FoldedBias("0", (1.0,)),
        FoldedBias("9", plan.folded_biases[0].bias),
        FoldedBias("0", (float("nan"),) * 12),
    ):
        with pytest.raises(HeadwiseError, match=r"does not match|NaN"):
            replace(plan, folded_biases=(folded,))


@pytest.mark.parametrize("name", ["ranking", "cache_ranking"])
def test_plan_apply_unknown_ranking_raises(name: str) -> None:
    model = character_model(MODELS["decoder"])
    plan = plan_pruning(model, PruneRequest(heads="0.1", fold_mean=False))
    unknown = Plan.from_json(json.dumps(json.loads(plan.to_json()) | {name: "luck"}))
    with pytest.raises(HeadwiseError, match="Got 'luck'"):
        apply(unknown, model)


def test_plan_load_file_without_format_names_commands(tmp_path: Path) -> None:
    data = json.loads(
        plan_pruning(character_model(MODELS["decoder"]), PruneRequest(heads="0.1", fold_mean=False)).to_json()
    )
    assert data.pop("format") == 2
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(HeadwiseError, match=r"format 1.*headwise prune … --save-plan.*headwise cache … --save-plan"):
        Plan.load(tmp_path / "plan.json")


def test_digest_depends_on_values_not_storage() -> None:
    model, digests = make_model(MODELS["decoder"]), set()
    for storage in ("qkv", "q,kv", "q,k,v"):
        other = make_model(MODELS["decoder"], storage=storage, seed=2)
        other.load_state_dict(model.state_dict())
        digests.add(weights_digest(other))
    assert digests == {weights_digest(model)}
    with torch.no_grad():
        model.heads["1.3"].W_V[0, 0] += 1e-12  # pyright: ignore
    assert weights_digest(model) not in digests


def test_plan_prunes_and_quantizes(tmp_path: Path) -> None:
    """Pruned heads request no bits: the shared key of 0.0 and 0.1 has 2 bits, not 8. Pruning comes before quantization."""
    model = make_model(MODELS["decoder, windows"]).float()
    plan = plan_pruning(
        model,
        PruneRequest(heads="0.0,1.*", fold_mean=False),
        cache={"0.1": 8},
        weights={"*": 8, "0.1": 2, "1.2": 4, "mlp": 4},
    )
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    small = apply(loaded, model)
    assert small.spec.cache == plan.cache
    bits = small.spec.attention_at(small.spec.layer_addresses[0]).weight_bits
    assert bits is not None
    assert (bits.q, bits.k) == ((32, 2, 8, 8), (2, 8))
    by_hand = quantize(model.prune("0.0,1.*", None, {"0.1": 8}), {"*": 8, "0.1": 2, "mlp": 4})
    assert small.spec == by_hand.spec
    assert same_weights(small, by_hand)
    assert "W_Q: 2 at 8 bits, 1 at 2 bits" in str(plan)
    quantized_only = apply(plan_pruning(model, weights=4, basis="balanced", group_size=5), model)
    assert same_weights(quantized_only, quantize(model, 4, basis="balanced", group_size=5))
    with pytest.raises(HeadwiseError, match="another model"):
        apply(plan, make_model(MODELS["decoder"]).float())
    with pytest.raises(HeadwiseError, match=r"specs differ in activation\. Make a plan"):
        apply(plan, make_model(replace(model.spec, activation="relu")))
    with pytest.raises(HeadwiseError, match="8, 4, 3 or 2 bits"):
        plan_pruning(model, weights=7)
    with pytest.raises(HeadwiseError, match=r"head 9.9 does not exist"):
        replace(plan, weight_rules=(*plan.weight_rules[:1], replace(plan.weight_rules[-1], heads=("9.9",))))


def test_plans_are_saved_and_loaded_with_model(tmp_path: Path) -> None:
    model = character_model(MODELS["decoder"])
    half = plan_pruning(model, PruneRequest(keep=0.5, ranking="gradient", corpus=TEXTS))
    small = apply(half, model)
    second_plan = plan_pruning(small, PruneRequest(heads=str(small.spec.head_addresses[0]), fold_mean=False))
    smaller = apply(second_plan, small)
    assert (model.plans, small.plans, smaller.plans) == ((), (half,), (half, second_plan))
    smaller.save(tmp_path / "small")
    assert load(tmp_path / "small").plans == (half, second_plan)
    assert not (model.save(tmp_path / "whole") / "plans.json").exists()
    file = tmp_path / "small" / "plans.json"
    data = json.loads(file.read_text())
    data["plans"][0]["pruned_heads"] = [str(smaller.spec.head_addresses[0])]
    file.write_text(json.dumps(data))
    with pytest.raises(HeadwiseError, match=r"plans\.json: a plan prunes heads that the saved model still has"):
        load(tmp_path / "small")
    file.write_text('{"plans": 3}')
    with pytest.raises(HeadwiseError, match="must be a list of plans"):
        load(tmp_path / "small")
