"""Plans: made, printed, saved, applied to the model they were made for, and refused everywhere else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.analysis.ablation.ablate import ablated, mean_activations
from headwise.compression.plan import Folded, Plan, digest
from headwise.compression.prune import prune
from headwise.compression.prune_heads import cut
from headwise.compression.quantize import quantise
from headwise.errors import HeadwiseError
from headwise.text.corpus import Corpus
from headwise.weights import load
from tests.analysis.models import TEXTS, reading
from tests.contract.layers import MODELS, assert_equal, make_model, token_ids
from tests.training.tiny import same_weights


@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, cut", "encoder"])
@pytest.mark.parametrize("fold", [True, False])
def test_a_plan_saved_and_applied_later_is_the_prune_of_now(name: str, fold: bool, tmp_path: Path) -> None:
    model = reading(MODELS[name]).float()
    plan = Plan.make(model, keep=0.5, on=TEXTS, fold=fold)
    back = Plan.load(plan.save(tmp_path / "plan.json"))
    assert back == plan
    now, later = prune(model, keep=0.5, on=TEXTS, fold=fold), back.apply(model)
    assert later.spec == now.spec
    assert same_weights(now, later)
    assert len(plan.cut) == len(model.spec.addresses) // 2
    assert len(plan.scores) == len(model.spec.addresses)
    assert bool(plan.folded) == fold


@pytest.mark.parametrize("name", ["decoder, windows", "encoder"])
@pytest.mark.parametrize("rounds", [1, 3])
@torch.no_grad()
def test_a_folded_plan_is_mean_ablation_in_rounds_as_well(name: str, rounds: int) -> None:
    model, ids = reading(MODELS[name]), token_ids(3, 7)
    plan = Plan.make(model, keep=0.4, on=TEXTS, rounds=rounds)
    with ablated(model, plan.addresses, "mean", means=mean_activations(model, TEXTS)):
        assert_equal(plan.apply(model)(ids), model(ids), 1e-9)


@torch.no_grad()
def test_without_folding_it_is_silence() -> None:
    model, ids = reading(MODELS["decoder"]), token_ids(3, 7)
    plan = Plan.make(model, cut="0.1,1.*", fold=False)
    assert (plan.by, plan.scores, plan.folded, plan.cut) == ("named", (), (), ("0.1", "1.0", "1.1", "1.2", "1.3"))
    with model.heads["0.1,1.*"].silenced():
        assert_equal(plan.apply(model)(ids), model(ids), 1e-9)


def test_a_plan_tells_what_goes() -> None:
    model = reading(MODELS["decoder"])
    assert str(Plan.make(model, cut="0.1,1.*", on=TEXTS)).splitlines() == [
        "5 of 8 heads are cut, named by hand; what they gave on average is folded in.",
        f"  on a list of {len(TEXTS)} texts ({Corpus.of(TEXTS).fingerprint[:12]})",
        "  layer 0 loses 1",
        "  layer 1 loses 0 1 2 3, all it had",
    ]
    assert "0.1" in repr(Plan.make(model, cut="0.1", fold=False))


def test_numbers_go_through_json_bit_by_bit() -> None:
    plan = Plan.make(reading(MODELS["decoder"]), cut="0.1", on=TEXTS)
    assert Plan.from_json(plan.to_json()).folded[0].bias == plan.folded[0].bias
    assert len(plan.folded) == 1
    assert len(plan.folded[0].bias) == plan.spec.width


def test_a_plan_for_another_model_is_refused() -> None:
    model = reading(MODELS["decoder"])
    plan = Plan.make(model, cut="0.1", on=TEXTS)
    other: Any
    for other, message in (
        (make_model(replace(model.spec, layers=3)), r"8 heads in 2 layers.*this one has 12 heads in 3 layers"),
        (make_model(model.spec, seed=1), "other weights of the same sizes"),
        (reading(MODELS["decoder"]).float(), "another dtype"),
        (plan.apply(model), "this one has 7 heads"),
        ("smollm2", "got str"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            plan.apply(other)
    assert plan.apply(reading(MODELS["decoder"])).spec.addresses == plan.spec.without("0.1").addresses


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    plan = Plan.make(reading(MODELS["decoder"]), keep=0.5, on=TEXTS)
    with pytest.raises(HeadwiseError, match="could not be read"):
        Plan.load(tmp_path / "nowhere.json")
    text = plan.to_json()
    for damaged, message in (
        (text[:100], "not valid JSON"),
        (json.dumps(json.loads(text) | {"colour": 1}), "no field 'colour'"),
        (json.dumps(json.loads(text) | {"cut": ["7.7"]}), "no head 7.7"),
        (json.dumps(json.loads(text) | {"by": "luck"}), "cannot be made by 'luck'"),
        (json.dumps(json.loads(text) | {"scores": [1.0]}), "1 scores for 8 heads"),
        (json.dumps(json.loads(text) | {"cut": ["0.1", "0.1"]}), "twice"),
        (json.dumps(json.loads(text) | {"digest": 3}), "digest must be str"),
    ):
        (tmp_path / "plan.json").write_text(damaged)
        with pytest.raises(HeadwiseError, match=message):
            Plan.load(tmp_path / "plan.json")
    for folded in (Folded("0", (1.0,)), Folded("9", plan.folded[0].bias), Folded("0", (float("nan"),) * 12)):
        with pytest.raises(HeadwiseError, match=r"does not fit|NaN"):
            replace(plan, folded=(folded,))


def test_a_digest_knows_numbers_and_not_how_they_are_kept() -> None:
    model, made = make_model(MODELS["decoder"]), set()
    for storage in ("qkv", "q,kv", "q,k,v"):
        other = make_model(MODELS["decoder"], storage=storage, seed=2)
        other.load_state_dict(model.state_dict())
        made.add(digest(other))
    assert made == {digest(model)}
    with torch.no_grad():
        model.heads["1.3"].W_V[0, 0] += 1e-12  # pyright: ignore
    assert digest(model) not in made


def test_a_plan_cuts_and_packs(tmp_path: Path) -> None:
    """Heads that go ask for no bits: the shared key of 0.0 and 0.1 is at 2 bits, not 8; applied it is cut, then quantised."""
    model = make_model(MODELS["decoder, windows"]).float()
    plan = Plan.make(model, cut="0.0,1.*", fold=False, cache={"0.1": 8}, weights={"*": 8, "0.1": 2, "1.2": 4, "mlp": 4})
    back = Plan.load(plan.save(tmp_path / "plan.json"))
    assert back == plan
    small = back.apply(model)
    assert small.spec.cache == plan.cache
    bits = small.spec.attention_at(small.spec.sites[0]).weights
    assert bits is not None
    assert (bits.q, bits.k) == ((32, 2, 8, 8), (2, 8))
    by_hand = quantise(cut(model, "0.0,1.*", None, {"0.1": 8}), {"*": 8, "0.1": 2, "mlp": 4})
    assert small.spec == by_hand.spec
    assert same_weights(small, by_hand)
    assert "W_Q: 2 at 8 bits, 1 at 2 bits" in str(plan)
    alone = Plan.make(model, weights=4, basis="balanced", group=5).apply(model)
    assert same_weights(alone, quantise(model, 4, basis="balanced", group=5))
    with pytest.raises(HeadwiseError, match="another model"):
        plan.apply(make_model(MODELS["decoder"]).float())
    with pytest.raises(HeadwiseError, match=r"Their specs differ in activation\. Make a plan"):
        plan.apply(make_model(replace(model.spec, activation="relu")))
    with pytest.raises(HeadwiseError, match="8, 4, 3 or 2 bits"):
        Plan.make(model, weights=7)
    with pytest.raises(HeadwiseError, match=r"head 9.9 is not there"):
        replace(plan, weights=(*plan.weights[:1], replace(plan.weights[-1], heads=("9.9",))))


def test_plans_are_saved_with_the_model(tmp_path: Path) -> None:
    model = reading(MODELS["decoder"])
    half = Plan.make(model, keep=0.5, by="gradient", on=TEXTS)
    small = half.apply(model)
    rest = Plan.make(small, cut=str(small.spec.addresses[0]), fold=False)
    smaller = rest.apply(small)
    assert (model.plans, small.plans, smaller.plans) == ((), (half,), (half, rest))
    smaller.save(tmp_path / "small")
    assert load(tmp_path / "small").plans == (half, rest)
    assert not (model.save(tmp_path / "whole") / "plans.json").exists()
    file = tmp_path / "small" / "plans.json"
    told = json.loads(file.read_text())
    told["plans"][0]["cut"] = [str(smaller.spec.addresses[0])]
    file.write_text(json.dumps(told))
    with pytest.raises(HeadwiseError, match=r"plans\.json holds a plan that cuts heads which are there"):
        load(tmp_path / "small")
    file.write_text('{"plans": 3}')
    with pytest.raises(HeadwiseError, match="tells no list of plans"):
        load(tmp_path / "small")
