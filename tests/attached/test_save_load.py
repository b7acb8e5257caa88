"""Cut models in folders: plans come back, whoever saves, attached or not, and however keys were shared out."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.attached import Attached
from headwise.attached.layer import matrix
from tests.attached.models import BY_NAME, CASES, Case, first, real, transformers
from tests.attached.test_analysis import TEXTS, build

CUT = [case for case in CASES if case.cut]
GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


def logits(model: Any, given: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return first(model(**given))[real(given)]


# Plans.


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_plans_come_back_whole(name: str, tmp_path: Path) -> None:
    theirs = hw.attach(*build(name))
    assert theirs.plans == ()
    half = hw.Plan.make(theirs, keep=0.5, by="gradient", on=TEXTS)
    small = half.apply(theirs)
    rest = hw.Plan.make(small, cut=[small.heads.addresses[0]], fold=False)
    smaller = rest.apply(small)
    assert (theirs.plans, small.plans, smaller.plans) == ((), (half,), (half, rest))
    smaller.save_pretrained(tmp_path / "small")
    again: Any = hw.load(tmp_path / "small")
    assert again.plans == (half, rest)
    told = again.plans[0]
    assert (told.by, len(told.scores), bool(told.folded)) == ("gradient", len(theirs.heads), True)
    assert told.on == f"a list of {len(TEXTS)} texts ({hw.Corpus.of(TEXTS).fingerprint[:12]})"
    assert set(again.heads.addresses) == set(theirs.heads.addresses) - set(half.addresses) - set(rest.addresses)
    assert f"{len(half.cut)} of {len(theirs.heads)} heads are cut, chosen by gradient" in str(told)
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "headwise.json").read_text() == (tmp_path / "small" / "headwise.json").read_text()


def test_plans_stay_with_the_model_when_it_is_detached() -> None:
    theirs = hw.attach(*build("llama"))
    plan = hw.Plan.make(theirs, cut="1.4", fold=False)
    model = plan.apply(theirs).detach()
    assert hw.attach(model).plans == (plan,)
    assert hw.attach(copy.deepcopy(theirs).detach()).plans == ()


def test_a_note_of_old_tells_the_heads_only(tmp_path: Path) -> None:
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs("right")
    theirs = hw.attach(model).cut("1.4,2.*")
    theirs.save_pretrained(tmp_path / "small")
    file = tmp_path / "small" / "headwise.json"
    note = json.loads(file.read_text())
    file.write_text(json.dumps({name: note[name] for name in ("format", "class", "kept")}))
    again: Any = hw.load(tmp_path / "small")
    assert again.plans == ()
    assert torch.equal(logits(again.model, given), logits(model, given))


def test_a_note_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    theirs = hw.attach(*build("llama"))
    folder = hw.prune(theirs, heads="1.4,2.1", fold=False).save_pretrained(tmp_path / "small")
    file = folder / "headwise.json"
    good = json.loads(file.read_text())
    for wrong, message in (
        ({"kept": good["kept"] | {"1": [0, 1, 2, 3, 4, 5]}}, "plan that cuts heads which are there"),
        ({"kept": {}, "plans": []}, "does not fit its note"),
        ({"apart": ["1"]}, "does not fit its note"),
        ({"apart": ["7"]}, "names layers that the model has not"),
        ({"apart": "1"}, "not a note of this version"),
        ({"plans": [{"cut": ["1.4"]}]}, "lacks the field"),
    ):
        file.write_text(json.dumps(good | wrong))
        with pytest.raises(hw.HeadwiseError, match=message):
            hw.load(folder)


# Whoever saves.


@pytest.mark.parametrize("case", CUT, ids=lambda case: case.name)
def test_plain_save_pretrained_of_a_cut_model_is_loaded_again(case: Case, tmp_path: Path) -> None:
    """Attached or detached: theirs is the method, and the note lies beside what it writes."""
    model, given = case.build(), case.inputs("right")
    theirs = hw.attach(model).cut("enc.0.1,dec.1.*,cross.2.3" if case.kind == "two" else "0.1,1.*,2.3")
    model.save_pretrained(tmp_path / "attached")
    want = logits(model, given)
    theirs.detach()
    model.save_pretrained(tmp_path / "detached")
    plain = logits(model, given)
    for name, there in (("attached", want), ("detached", plain)):
        again: Any = hw.load(tmp_path / name)
        assert torch.equal(logits(again.model, given), there)
        assert again.heads.addresses == theirs.heads.addresses
        with pytest.raises(RuntimeError, match=r"size|shape|mismatch"):
            type(model).from_pretrained(tmp_path / name)
    assert (want - plain).abs().max() <= 1e-4


@pytest.mark.parametrize("name", GROUPED)
def test_uneven_groups_detached_and_saved(name: str, tmp_path: Path) -> None:
    """Heads have keys of their own then, in the folder too; written whole they share them again."""
    case = BY_NAME[name]
    model, given = case.build(), case.inputs("right")
    theirs = hw.attach(model)
    with theirs.heads.select("1.4").silenced():
        want = logits(model, given)
    model = theirs.cut("1.4").detach()
    plain = logits(model, given)
    assert (plain - want).abs().max() <= 1e-4
    model.save_pretrained(tmp_path / "small")
    again: Any = hw.load(tmp_path / "small")
    assert matrix(again.attention_layers()[1].found.reader(1)).shape[0] == 5 * 4
    assert torch.equal(logits(again.model, given), plain)
    again.cut("1.0-2").save_pretrained(tmp_path / "less")  # two heads are left, of one group, with keys of their own
    less: Any = hw.load(tmp_path / "less")
    assert torch.equal(logits(less.model, given), logits(again.model, given))
    assert torch.equal(logits(less.detach(), given), logits(again.detach(), given))

    back = hw.attach(model)
    back.save_pretrained(tmp_path / "whole", whole=True)
    whole = type(model).from_pretrained(tmp_path / "whole").eval()
    assert sum(v.numel() for v in whole.parameters()) == sum(v.numel() for v in case.build().parameters())
    assert (logits(whole, given) - want).abs().max() <= 1e-4


def test_keys_that_went_their_own_ways_cannot_be_shared_again(tmp_path: Path) -> None:
    model = hw.attach(BY_NAME["llama"].build()).cut("1.4").detach()
    theirs = hw.attach(model)
    with torch.no_grad():
        matrix(theirs.attention_layers()[1].found.reader(1))[0] += 1
    with pytest.raises(hw.HeadwiseError, match="cannot be shared again"):
        theirs.save_pretrained(tmp_path / "whole", whole=True)
    assert not (tmp_path / "whole").exists()
    theirs.save_pretrained(tmp_path / "small")
    given = BY_NAME["llama"].inputs("right")
    again: Any = hw.load(tmp_path / "small")
    assert torch.equal(logits(again.model, given), logits(model, given))


def test_parts_of_a_cut_model_and_copies_of_it_are_saved_with_the_note(tmp_path: Path) -> None:
    model, given = BY_NAME["llama"].build(), BY_NAME["llama"].inputs("right")
    theirs = hw.attach(model).cut("1.4")
    twin = copy.deepcopy(theirs).cut("2.*")
    twin.model.save_pretrained(tmp_path / "twin")
    model.model.save_pretrained(tmp_path / "body")
    body, other = hw.load(tmp_path / "body"), hw.load(tmp_path / "twin")
    assert isinstance(body, Attached)
    assert isinstance(body.model, transformers.LlamaModel)
    assert torch.equal(logits(body.model, given), logits(model.model, given))
    assert (len(body.heads), len(other.heads)) == (17, 11)
    with pytest.raises(hw.HeadwiseError, match="save it, then upload"):
        model.save_pretrained(tmp_path / "hub", push_to_hub=True)
    assert not (tmp_path / "hub").exists()
