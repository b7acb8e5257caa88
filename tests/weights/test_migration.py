"""Models saved in format 1 load, give the same logits, and are saved in format 2."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import headwise as hw
from headwise.spec.migration import to_format_1_tensor_name
from headwise.weights.model_info import info

DATA = Path(__file__).parent / "data" / "format1"
LOGITS: dict[str, list[float]] = json.loads((DATA / "logits.json").read_text())
NATIVE = ("decoder", "pruned", "quantized", "encoder", "encoder_decoder")
IDS = torch.arange(12)[None] % 20


def logits_of(model: Any) -> torch.Tensor:
    inputs = {"source": IDS} if model.spec.kind == "encoder-decoder" else {}
    with torch.no_grad():
        return model(IDS, **inputs)


def edit_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("name", LOGITS)
def test_load_format_1_gives_its_logits(name: str) -> None:
    logits = logits_of(hw.load(DATA / name)).flatten()[:200]
    torch.testing.assert_close(logits, torch.tensor(LOGITS[name]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", LOGITS)
def test_save_of_migrated_model_loads_equally(name: str, tmp_path: Path) -> None:
    model = hw.load(DATA / name)
    model.save(tmp_path / "m")
    again = hw.load(tmp_path / "m")
    assert again.spec == model.spec
    assert again.plans == model.plans
    state, state_again = model.state_dict(), again.state_dict()
    assert state.keys() == state_again.keys()
    assert all(torch.equal(tensor, state_again[key]) for key, tensor in state.items())
    assert torch.equal(logits_of(again), logits_of(model))
    if name == "attached":
        assert json.loads((tmp_path / "m" / "headwise.json").read_text())["format"] == "headwise-attached-2"
    else:
        assert json.loads((tmp_path / "m" / "spec.json").read_text())["format"] == 2
        with safe_open(tmp_path / "m" / "model.safetensors", "pt") as opened:
            assert opened.metadata()["format"] == "headwise-2"


@pytest.mark.parametrize("name", NATIVE)
def test_migrated_tensor_names_lead_back_to_format_1(name: str) -> None:
    model = hw.load(DATA / name)
    tied = "output.vocabulary.weight"
    names = {to_format_1_tensor_name(key) for key in model.state_dict() if not (model.spec.tied and key == tied)}
    with safe_open(DATA / name / "model.safetensors", "pt") as opened:
        assert names == set(opened.keys())


def test_info_reads_format_1() -> None:
    assert info(DATA / "pruned").heads == 6
    assert info(DATA / "quantized").cache_policies.startswith("streaming 2 + 8, 8 bits: 1 of 7")


def test_migrated_plan_applies_to_model_it_was_made_for(tmp_path: Path) -> None:
    """The digest in the plan is over the tensor names of format 1."""
    full, pruned = hw.load(DATA / "decoder"), hw.load(DATA / "pruned")
    (plan,) = pruned.plans
    assert plan.pruned_heads == ("0.1", "1.2")
    small = hw.apply(plan, full)
    assert all(torch.equal(tensor, small.state_dict()[key]) for key, tensor in pruned.state_dict().items())
    pruned.save(tmp_path / "m")
    hw.apply(hw.load(tmp_path / "m").plans[0], full)
    with torch.no_grad():
        next(full.parameters()).add_(1.0)
    with pytest.raises(hw.HeadwiseError, match="other weights"):
        hw.apply(plan, full)


def test_migrated_cache_ranking_has_its_new_name(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(DATA / "quantized", folder)
    plans = json.loads((folder / "plans.json").read_text())["plans"]
    scores = [float(index) for index in range(8)]
    edit_json(
        folder / "plans.json",
        plans=[
            plans[0]
            | {"by": "random", "on": "a book", "cache_by": "writes", "cache_on": "a page", "cache_scores": scores}
        ],
    )
    (plan,) = hw.load(folder).plans
    assert (plan.ranking, plan.corpus, plan.cache_ranking, plan.cache_corpus) == (
        "random",
        "a book",
        "output",
        "a page",
    )


def test_plan_file_of_format_1_names_the_command(tmp_path: Path) -> None:
    plan = json.loads((DATA / "pruned" / "plans.json").read_text())["plans"][0]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(hw.HeadwiseError, match=r"headwise prune … --save-plan .*headwise cache … --save-plan"):
        hw.Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("version", [3, 0, "2", True, None])
def test_load_unknown_format_raises(version: Any, tmp_path: Path) -> None:
    shutil.copytree(DATA / "decoder", tmp_path / "m")
    edit_json(tmp_path / "m" / "spec.json", format=version)
    with pytest.raises(hw.HeadwiseError, match="reads formats 1 and 2"):
        hw.load(tmp_path / "m")


def test_load_field_under_both_names_raises(tmp_path: Path) -> None:
    shutil.copytree(DATA / "decoder", tmp_path / "m")
    edit_json(tmp_path / "m" / "spec.json", mlp_width=64)
    with pytest.raises(hw.HeadwiseError, match="present twice"):
        hw.load(tmp_path / "m")


def test_load_attached_layouts_of_format_1(tmp_path: Path) -> None:
    shutil.copytree(DATA / "attached", tmp_path / "m")
    edit_json(tmp_path / "m" / "headwise.json", layouts={"0": {"q": "joined", "k": "joined", "v": "joined"}})
    logits = logits_of(hw.load(tmp_path / "m")).flatten()[:200]
    torch.testing.assert_close(logits, torch.tensor(LOGITS["attached"]), rtol=0, atol=1e-5)
