"""Recovery fine-tuning: a pruned model that is trained in place has a lower loss on held-out text."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import headwise as hw
from headwise.compression.prune_request import PruneRequest
from headwise.compression.prune_study import PruneStudy, prune_study
from headwise.compression.recovery_finetune import recover
from headwise.distillation import DistillConfig
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import add_bos_eos, add_mask_token, word_tokenizer
from headwise.training import Recipe, train
from headwise.weights import load
from tests.distillation.tiny import make_model as make_student

WORDS = tuple(f"w{i}x" for i in range(20))
GROUPED = ModelSpec(vocab=1, context=24, layers=1, attention=AttentionSpec(width=32, heads=4, kv_heads=2))
MASKED = replace(GROUPED, kind="encoder", output="mlm")
TRAIN_RECIPE = Recipe(steps=300, batch_size=16, learning_rate=1e-2, warmup=20, rows="texts", evaluate_every=300)
QUICK: dict[str, Any] = {"steps": 4, "batch_size": 4, "progress": False}


def repeating_texts(count: int, seed: int, different: int = 3) -> list[str]:
    """Return texts of 24 words in which `different` words repeat."""
    rng = np.random.default_rng(seed)
    return [" ".join(list(rng.choice(WORDS, different, replace=False)) * (24 // different)) for _ in range(count)]


def new_model(spec: ModelSpec) -> Transformer:
    tokenizer = add_bos_eos(add_mask_token(word_tokenizer(WORDS)), add_eos=spec.kind == "encoder")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(replace(spec, vocab=len(tokenizer)))
    model.tokenizer = tokenizer
    return model


@torch.no_grad()
def held_out_loss(model: Transformer, different: int) -> float:
    """Return the held-out loss from all logits: of each next word, or of every fifth word, masked."""
    tokenizer = model.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.mask is not None
    ids = torch.tensor([tokenizer.encode(text)[:24] for text in repeating_texts(50, 9, different)])  # (B, T)
    if model.spec.kind == "decoder":
        return F.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:]).item()
    hidden = ids.clone()
    hidden[:, 1::5] = tokenizer.mask
    return F.cross_entropy(model(hidden)[:, 1::5].mT, ids[:, 1::5]).item()


@pytest.mark.parametrize(("spec", "different"), [(GROUPED, 3), (MASKED, 1)])
def test_recover_reduces_loss_after_pruning(spec: ModelSpec, different: int) -> None:
    full = train(new_model(spec), repeating_texts(800, 0, different), TRAIN_RECIPE, progress=False).model
    small = full.prune("0.0,0.1,0.2")
    full_loss, pruned_loss = held_out_loss(full, different), held_out_loss(small, different)
    assert pruned_loss > full_loss + 0.2
    recovered = recover(
        small, repeating_texts(800, 1, different), steps=100, learning_rate=3e-3, rows="texts", progress=False
    )
    assert recovered.model is small
    assert (recovered.step, recovered.stop_reason) == (100, "finished")
    assert held_out_loss(small, different) < pruned_loss - 0.5 * (pruned_loss - full_loss)
    assert small.spec == full.spec.without("0.0,0.1,0.2")


def test_recover_default_recipe_is_conservative(tmp_path: Path) -> None:
    model = new_model(GROUPED)
    recover(model, repeating_texts(40, seed=0), out=tmp_path / "run", **QUICK)
    recipe = saved_recipe(tmp_path / "run")
    assert [recipe[name] for name in ("steps", "batch_size", "context", "warmup", "weight_decay")] == [4, 4, 24, 0, 0]
    assert 0 < recipe["learning_rate"] < Recipe().learning_rate
    recover(model, repeating_texts(40, seed=0), out=tmp_path / "other", **QUICK, learning_rate=0.01, context=8)
    recipe = saved_recipe(tmp_path / "other")
    assert (recipe["learning_rate"], recipe["context"]) == (0.01, 8)
    loaded = load(tmp_path / "other" / "model")
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])


def saved_recipe(folder: Path) -> dict[str, Any]:
    """Return the recipe of a run."""
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))["recipe"]


def test_recover_default_context_is_limited(tmp_path: Path) -> None:
    model = new_model(replace(GROUPED, context=2048))
    recover(model, repeating_texts(40, seed=0), out=tmp_path / "run", **QUICK)
    assert saved_recipe(tmp_path / "run")["context"] == 256


def test_recover_valid_text_gives_valid_loss() -> None:
    model = new_model(GROUPED)
    recovered = recover(model, repeating_texts(40, seed=0), valid=repeating_texts(10, seed=1), **QUICK)
    assert recovered.valid_loss is not None
    # Four evaluations, the last one at the end.
    assert len([row for row in recovered.history if "valid_loss" in row]) == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"learning_rates": 1e-3}, "did you mean learning_rate"),
        ({"zzz": 1}, "known: accumulation_steps"),
        ({"learning_rate": -1.0}, "above 0"),
    ],
)
def test_recover_invalid_recipe_field_raises(wrong: dict[str, Any], message: str) -> None:
    model = new_model(GROUPED)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(HeadwiseError, match=message):
        recover(model, repeating_texts(40, seed=0), **QUICK, **wrong)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_recover_unsupported_model_raises() -> None:
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        recover(Transformer(replace(GROUPED, vocab=30)), "a b", **QUICK)
    with pytest.raises(HeadwiseError, match="no output"):
        recover(new_model(replace(MASKED, output="none")), repeating_texts(40, seed=0), **QUICK)
    with pytest.raises(HeadwiseError, match="empty"):
        recover(new_model(GROUPED), "", **QUICK)


def test_recover_with_teacher_reduces_kl() -> None:
    full = make_student(3, layers=2)
    with torch.no_grad():
        for head in full.heads:
            head.W_O.mul_(8.0)  # increases the effect of pruning a head
    small = hw.prune(full, heads="0.1,0.3,1.*", fold_mean=False)
    texts = " ".join(str(n * n) for n in range(400))
    assert full.tokenizer is not None
    ids = torch.tensor([full.tokenizer.encode(texts[:60])])

    def teacher_kl() -> float:
        with torch.no_grad():
            p, q = (model(ids).log_softmax(-1) for model in (full, small))
        return float((p.exp() * (p - q)).sum(-1).mean())

    before = teacher_kl()
    recover(
        small,
        texts,
        steps=60,
        batch_size=4,
        context=32,
        learning_rate=3e-3,
        teacher=full,
        losses=DistillConfig(alpha=1.0),
        progress=False,
    )
    assert teacher_kl() < before / 2
    with pytest.raises(hw.HeadwiseError, match="teacher="):
        recover(small, texts, steps=1, losses="logits", progress=False)


def test_prune_study_recovers_with_full_model_as_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    model, teachers = new_model(GROUPED), []

    def record_call(pruned: Transformer, **options: Any) -> None:
        teachers.append((options.get("teacher"), options.get("losses")))

    monkeypatch.setattr(sys.modules["headwise.compression.prune_study"], "recover", record_call)
    for losses in (None, "text", "qkv,maps"):
        request = PruneRequest(heads="0.1", corpus=repeating_texts(8, seed=0))
        prune_study(model, PruneStudy(request, recover_steps=2, recover_losses=losses, seeds=0))
    with_teacher = [pair for pair in teachers if pair != (None, None)]
    assert with_teacher == [(model, ("logits",)), (model, ("qkv", "maps"))], (
        "full models with the same training have no teacher"
    )
