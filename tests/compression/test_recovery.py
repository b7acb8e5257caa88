"""Healing: a cut model, trained a little further in place, loses less on text it has not seen."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.compression import prune_study as prune_study_module
from headwise.compression.prune_heads import cut
from headwise.compression.prune_request import PruneRequest
from headwise.compression.prune_study import PruneStudy, prune_study
from headwise.compression.recovery import heal
from headwise.distillation import Lesson
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import add_frame, add_mask, word_tokenizer
from headwise.training import Recipe, train
from headwise.weights import load
from tests.distillation.tiny import make as make_student

WORDS = tuple(f"w{i}x" for i in range(20))
GROUPED = ModelSpec(vocab=1, context=24, layers=1, attention=AttentionSpec(width=32, heads=4, kv_heads=2))
MASKED = replace(GROUPED, kind="encoder", output="mlm")
BEFORE = Recipe(steps=300, batch=16, rate=1e-2, warmup=20, rows="texts", evaluate_every=300)
QUICK: dict[str, Any] = {"steps": 4, "batch": 4, "progress": False}


def rounds(count: int, seed: int, different: int = 3) -> list[str]:
    """Texts of 24 words in which so many different ones come round again and again."""
    dice = np.random.default_rng(seed)
    return [" ".join(list(dice.choice(WORDS, different, replace=False)) * (24 // different)) for _ in range(count)]


def new(spec: ModelSpec) -> Transformer:
    tokenizer = add_frame(add_mask(word_tokenizer(WORDS)), behind=spec.kind == "encoder")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(replace(spec, vocab=len(tokenizer)))
    model.tokenizer = tokenizer
    return model


@torch.no_grad()
def held_out(model: Transformer, different: int) -> float:
    """The loss on other texts, read as in training, from all the logits: of each next word, or of every fifth, hidden."""
    tokenizer = model.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.mask is not None
    ids = torch.tensor([tokenizer.encode(text)[:24] for text in rounds(50, 9, different)])  # (B, T)
    if model.spec.kind == "decoder":
        return F.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:]).item()
    hidden = ids.clone()
    hidden[:, 1::5] = tokenizer.mask
    return F.cross_entropy(model(hidden)[:, 1::5].mT, ids[:, 1::5]).item()


@pytest.mark.parametrize(("spec", "different"), [(GROUPED, 3), (MASKED, 1)])
def test_healing_wins_back_what_cutting_lost(spec: ModelSpec, different: int) -> None:
    whole = train(new(spec), rounds(800, 0, different), BEFORE, progress=False).model
    small = cut(whole, "0.0,0.1,0.2")
    sound, wounded = held_out(whole, different), held_out(small, different)
    assert wounded > sound + 0.2
    healed = heal(small, rounds(800, 1, different), steps=100, rate=3e-3, rows="texts", progress=False)
    assert healed.model is small
    assert (healed.step, healed.stopped) == (100, "finished")
    assert held_out(small, different) < wounded - 0.5 * (wounded - sound)
    assert small.spec == whole.spec.without("0.0,0.1,0.2")


def test_it_is_gentle_unless_told_otherwise(tmp_path: Path) -> None:
    model = new(GROUPED)
    heal(model, rounds(40, seed=0), out=tmp_path / "run", **QUICK)
    recipe = noted(tmp_path / "run")
    assert [recipe[name] for name in ("steps", "batch", "context", "warmup", "weight_decay")] == [4, 4, 24, 0, 0]
    assert 0 < recipe["rate"] < Recipe().rate
    heal(model, rounds(40, seed=0), out=tmp_path / "other", **QUICK, rate=0.01, context=8)
    recipe = noted(tmp_path / "other")
    assert (recipe["rate"], recipe["context"]) == (0.01, 8)
    back = load(tmp_path / "other" / "model")
    for name, value in model.state_dict().items():
        assert torch.equal(value, back.state_dict()[name])


def noted(folder: Path) -> dict[str, Any]:
    """The recipe of a run."""
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))["recipe"]


def test_rows_are_never_long_where_nobody_asked_for_long_ones(tmp_path: Path) -> None:
    model = new(replace(GROUPED, context=2048))
    heal(model, rounds(40, seed=0), out=tmp_path / "run", **QUICK)
    assert noted(tmp_path / "run")["context"] == 256


def test_held_out_text_may_be_given() -> None:
    model = new(GROUPED)
    healed = heal(model, rounds(40, seed=0), valid=rounds(10, seed=1), **QUICK)
    assert healed.valid_loss is not None
    assert len([row for row in healed.history if "valid_loss" in row]) == 4  # four looks on the way, the end among them


@pytest.mark.parametrize(
    ("wrong", "told"),
    [({"rates": 1e-3}, "did you mean rate"), ({"zzz": 1}, "known: accumulate"), ({"rate": -1.0}, "above 0")],
)
def test_fields_that_no_recipe_has_are_refused(wrong: dict[str, Any], told: str) -> None:
    model = new(GROUPED)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(HeadwiseError, match=told):
        heal(model, rounds(40, seed=0), **QUICK, **wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_models_that_cannot_be_healed_are_refused() -> None:
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        heal(Transformer(replace(GROUPED, vocab=30)), "a b", **QUICK)
    with pytest.raises(HeadwiseError, match="no output"):
        heal(new(replace(MASKED, output="none")), rounds(40, seed=0), **QUICK)
    with pytest.raises(HeadwiseError, match="empty"):
        heal(new(GROUPED), "", **QUICK)


def test_with_a_teacher_the_cut_model_comes_nearer_to_it() -> None:
    whole = make_student(3, layers=2)
    with torch.no_grad():
        for head in whole.heads:
            head.W_O.mul_(8.0)  # so that it matters whether a head is there
    small = hw.prune(whole, heads="0.1,0.3,1.*", fold=False)
    texts = " ".join(str(n * n) for n in range(400))
    assert whole.tokenizer is not None
    ids = torch.tensor([whole.tokenizer.encode(texts[:60])])

    def apart() -> float:
        with torch.no_grad():
            p, q = (model(ids).log_softmax(-1) for model in (whole, small))
        return float((p.exp() * (p - q)).sum(-1).mean())

    before = apart()
    heal(small, texts, steps=60, batch=4, context=32, rate=3e-3, teacher=whole, learn=Lesson(alpha=1.0), progress=False)
    assert apart() < before / 2
    with pytest.raises(hw.HeadwiseError, match="give teacher="):
        heal(small, texts, steps=1, learn="logits", progress=False)


def test_a_study_heals_by_the_whole_model_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taught = new(GROUPED), []

    def note(cut: Transformer, **given: Any) -> None:
        taught.append((given.get("teacher"), given.get("learn")))

    monkeypatch.setattr(prune_study_module, "heal", note)
    for by in (None, "text", "qkv,maps"):
        request = PruneRequest(heads="0.1", on=rounds(8, seed=0))
        prune_study(model, PruneStudy(request, heal=2, heal_by=by, seeds=0))
    firsts = [pair for pair in taught if pair != (None, None)]
    assert firsts == [(model, ("logits",)), (model, ("qkv", "maps"))], (
        "whole models that are trained alike have no teacher"
    )
