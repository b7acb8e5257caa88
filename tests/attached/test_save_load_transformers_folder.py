"""Saved pruned models: plans are restored, whether saved attached or detached, and for all KV groupings."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.attached import AttachedModel
from headwise.attached.layer import weight_matrix
from headwise.compression import PruneRequest
from tests.attached.models import BY_NAME, CASES, Case, main_output, real_positions, transformers
from tests.attached.test_analysis import TEXTS, build

PRUNABLE = [case for case in CASES if case.prunable]
GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return main_output(model(**inputs))[real_positions(inputs)]


# Plans.


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_load_pruned_model_restores_plans(name: str, tmp_path: Path) -> None:
    attached = hw.attach(*build(name))
    assert attached.plans == ()
    half = hw.plan_pruning(attached, PruneRequest(keep=0.5, ranking="gradient", corpus=TEXTS))
    small = hw.apply(half, attached)
    second_plan = hw.plan_pruning(small, PruneRequest(heads=[small.heads.addresses[0]], fold_mean=False))
    smaller = hw.apply(second_plan, small)
    assert (attached.plans, small.plans, smaller.plans) == ((), (half,), (half, second_plan))
    smaller.save_pretrained(tmp_path / "small")
    again: Any = hw.load(tmp_path / "small")
    assert again.plans == (half, second_plan)
    loaded_plan = again.plans[0]
    assert (loaded_plan.ranking, len(loaded_plan.scores), bool(loaded_plan.folded_biases)) == (
        "gradient",
        len(attached.heads),
        True,
    )
    assert loaded_plan.corpus == f"a list of {len(TEXTS)} texts ({hw.Corpus.of(TEXTS).fingerprint[:12]})"
    assert set(again.heads.addresses) == set(attached.heads.addresses) - set(half.pruned_addresses) - set(
        second_plan.pruned_addresses
    )
    assert f"{len(half.pruned_heads)} of {len(attached.heads)} heads are pruned, chosen by gradient" in str(loaded_plan)
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "headwise.json").read_text() == (tmp_path / "small" / "headwise.json").read_text()


def test_detach_keeps_plans_on_model() -> None:
    attached = hw.attach(*build("llama"))
    plan = hw.plan_pruning(attached, PruneRequest(heads="1.4", fold_mean=False))
    model = hw.apply(plan, attached).detach()
    assert hw.attach(model).plans == (plan,)
    assert hw.attach(copy.deepcopy(attached).detach()).plans == ()


def test_load_old_metadata_restores_heads_only(tmp_path: Path) -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs("right")
    attached = hw.attach(model).prune("1.4,2.*", in_place=True)
    attached.save_pretrained(tmp_path / "small")
    file = tmp_path / "small" / "headwise.json"
    metadata = json.loads(file.read_text())
    file.write_text(json.dumps({name: metadata[name] for name in ("format", "class", "kept_heads")}))
    again: Any = hw.load(tmp_path / "small")
    assert again.plans == ()
    assert torch.equal(logits(again.model, inputs), logits(model, inputs))


def test_load_inconsistent_metadata_raises(tmp_path: Path) -> None:
    attached = hw.attach(*build("llama"))
    folder = hw.prune(attached, heads="1.4,2.1", fold_mean=False).save_pretrained(tmp_path / "small")
    file = folder / "headwise.json"
    good = json.loads(file.read_text())
    for wrong, message in (
        ({"kept_heads": good["kept_heads"] | {"1": [0, 1, 2, 3, 4, 5]}}, "still has"),
        ({"kept_heads": {}, "plans": []}, "from checkpoint, the shape in current"),
        ({"kv_expanded": ["1"]}, "from checkpoint, the shape in current"),
        ({"kv_expanded": ["7"]}, "names layers that the model does not"),
        ({"kv_expanded": "1"}, "not a valid metadata file of this"),
        ({"plans": [{"format": good["plans"][0]["format"], "pruned_heads": ["1.4"]}]}, "required field"),
    ):
        file.write_text(json.dumps(good | wrong))
        with pytest.raises(hw.HeadwiseError, match=message):
            hw.load(folder)


# Saving attached and detached models.


@pytest.mark.parametrize("case", PRUNABLE, ids=lambda case: case.name)
def test_save_pretrained_pruned_model_loads_again(case: Case, tmp_path: Path) -> None:
    """`save_pretrained` of the transformers model writes the metadata file, attached or detached."""
    model, inputs = case.build(), case.inputs("right")
    attached = hw.attach(model).prune(
        "enc.0.1,dec.1.*,cross.2.3" if case.kind == "two" else "0.1,1.*,2.3", in_place=True
    )
    model.save_pretrained(tmp_path / "attached")
    want = logits(model, inputs)
    attached.detach()
    model.save_pretrained(tmp_path / "detached")
    plain = logits(model, inputs)
    for name, expected in (("attached", want), ("detached", plain)):
        again: Any = hw.load(tmp_path / name)
        assert torch.equal(logits(again.model, inputs), expected)
        assert again.heads.addresses == attached.heads.addresses
        with pytest.raises(RuntimeError, match=r"size|shape|mismatch"):
            type(model).from_pretrained(tmp_path / name)
    assert (want - plain).abs().max() <= 1e-4


@pytest.mark.parametrize("name", GROUPED)
def test_save_pretrained_detached_uneven_groups_loads_again(name: str, tmp_path: Path) -> None:
    """Detached heads have their own keys, also in the folder; in full shape they share keys again."""
    case = BY_NAME[name]
    model, inputs = case.build(), case.inputs("right")
    attached = hw.attach(model)
    with attached.heads.select("1.4").silenced():
        want = logits(model, inputs)
    model = attached.prune("1.4", in_place=True).detach()
    plain = logits(model, inputs)
    assert (plain - want).abs().max() <= 1e-4
    model.save_pretrained(tmp_path / "small")
    again: Any = hw.load(tmp_path / "small")
    assert weight_matrix(again.attention_layers()[1].info.qkv_module(1)).shape[0] == 5 * 4
    assert torch.equal(logits(again.model, inputs), plain)
    # Two heads of one group remain, with their own keys.
    again.prune("1.0-2", in_place=True).save_pretrained(tmp_path / "less")
    less: Any = hw.load(tmp_path / "less")
    assert torch.equal(logits(less.model, inputs), logits(again.model, inputs))
    assert torch.equal(logits(less.detach(), inputs), logits(again.detach(), inputs))

    back = hw.attach(model)
    back.save_pretrained(tmp_path / "whole", full_shape=True)
    full = type(model).from_pretrained(tmp_path / "whole").eval()
    assert sum(v.numel() for v in full.parameters()) == sum(v.numel() for v in case.build().parameters())
    assert (logits(full, inputs) - want).abs().max() <= 1e-4


def test_save_full_diverged_keys_raises(tmp_path: Path) -> None:
    model = hw.attach(BY_NAME["llama"].build()).prune("1.4", in_place=True).detach()
    attached = hw.attach(model)
    with torch.no_grad():
        weight_matrix(attached.attention_layers()[1].info.qkv_module(1))[0] += 1
    with pytest.raises(hw.HeadwiseError, match="cannot be merged into shared KV heads"):
        attached.save_pretrained(tmp_path / "whole", full_shape=True)
    assert not (tmp_path / "whole").exists()
    attached.save_pretrained(tmp_path / "small")
    inputs = BY_NAME["llama"].inputs("right")
    again: Any = hw.load(tmp_path / "small")
    assert torch.equal(logits(again.model, inputs), logits(model, inputs))


def test_save_pretrained_submodule_or_copy_writes_metadata(tmp_path: Path) -> None:
    model, inputs = BY_NAME["llama"].build(), BY_NAME["llama"].inputs("right")
    attached = hw.attach(model).prune("1.4", in_place=True)
    twin = copy.deepcopy(attached).prune("2.*", in_place=True)
    twin.model.save_pretrained(tmp_path / "twin")
    model.model.save_pretrained(tmp_path / "body")
    body, other = hw.load(tmp_path / "body"), hw.load(tmp_path / "twin")
    assert isinstance(body, AttachedModel)
    assert isinstance(body.model, transformers.LlamaModel)
    assert torch.equal(logits(body.model, inputs), logits(model.model, inputs))
    assert (len(body.heads), len(other.heads)) == (17, 11)
    with pytest.raises(hw.HeadwiseError, match="upload the folder"):
        model.save_pretrained(tmp_path / "hub", push_to_hub=True)
    assert not (tmp_path / "hub").exists()
