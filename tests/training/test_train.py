"""A run as a caller sees it."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.model.loss import IGNORE
from headwise.text.build_tokenizers import byte_tokenizer, character_tokenizer
from headwise.training import Recipe, TrainRequest, start
from headwise.training.batches import masked
from headwise.training.default_recipe import LITTLE
from headwise.training.synthetic_eval import can_sit
from tests.training.tiny import MASKED, NOISY, PLAIN, SHORT, TEXT, checkpoint, run, same_weights, there, timeless, words

# Looking in.


@pytest.mark.parametrize(("every", "expected"), [(6, [0, 6, 12, 18, 20]), (5, [0, 5, 10, 15, 20]), (50, [0, 20])])
def test_the_caller_looks_in_on_time(every: int, expected: list[int]) -> None:
    seen: list[int] = []
    run(PLAIN, SHORT, call=lambda model, step: seen.append(step), every=every)
    assert seen == expected


def draws(model: Transformer) -> None:
    torch.manual_seed(1)
    torch.rand(1000)


def switches(model: Transformer) -> None:
    model.eval()
    model(torch.arange(8)[None])


def measures(model: Transformer) -> None:
    """As one does to see which head matters: the gradient of a loss."""
    model(torch.arange(8)[None]).logsumexp(-1).mean().backward()


@pytest.mark.parametrize("look", [draws, switches, measures])
def test_looking_changes_nothing(look: Callable[[Transformer], None]) -> None:
    looked = run(NOISY, SHORT, call=lambda model, step: look(model), every=3)
    alone = run(NOISY, SHORT)
    assert timeless(looked.history) == timeless(alone.history)
    assert same_weights(looked.model, alone.model)


def test_what_the_caller_sees_is_the_model_of_that_step() -> None:
    seen: dict[int, torch.Tensor] = {}
    made = run(PLAIN, SHORT, call=lambda m, step: seen.update({step: m.embed.tokens.weight.clone().detach()}), every=20)
    torch.manual_seed(SHORT.seed)
    assert torch.equal(seen[0], Transformer(PLAIN).embed.tokens.weight)
    assert torch.equal(seen[20], made.model.embed.tokens.weight)


# Seeds.


def test_the_same_seed_gives_the_same_weights_and_another_others() -> None:
    one, same, other = (run(NOISY, replace(SHORT, seed=seed)) for seed in (1, 1, 2))
    assert same_weights(one.model, same.model)
    assert not same_weights(one.model, other.model)


def test_the_callers_random_numbers_are_left_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(5)
    torch.manual_seed(11)
    run(NOISY, SHORT, call=lambda model, step: torch.rand(3))
    assert torch.equal(torch.rand(5), expected)
    torch.manual_seed(12)  # and they do not matter
    assert same_weights(run(NOISY, SHORT).model, run(NOISY, SHORT).model)


# Learning.


def test_a_text_without_surprise_is_learnt() -> None:
    recipe = Recipe(steps=150, batch=8, rate=1e-2, warmup=10, holdout=0.2)
    made = run(PLAIN, recipe, text="abcd" * 200, tokenizer="character")
    first = run(PLAIN, replace(recipe, steps=1), text="abcd" * 200, tokenizer="character")
    assert first.loss == pytest.approx(math.log(6), abs=0.3)  # six tokens, nothing known yet
    assert made.loss < 0.05
    assert made.valid_loss is not None
    assert made.valid_loss < 0.1


def test_a_text_of_coins_is_learnt_to_its_entropy() -> None:
    dice = random.Random(0)
    text = "".join(dice.choice("ab") for _ in range(6000))
    made = run(PLAIN, Recipe(steps=200, batch=16, rate=3e-3, warmup=10), text=text, tokenizer="character")
    assert made.valid_loss == pytest.approx(math.log(2), abs=0.05)


def held_out(share: float) -> torch.Tensor:
    tokens = torch.tensor([*TEXT.encode(), 256])
    return tokens[len(tokens) - int(len(tokens) * share) :]


def test_the_last_evaluation_reads_all_that_was_held_out() -> None:
    made = run(NOISY, SHORT)
    tokens, total = held_out(SHORT.holdout), 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 8):
            row = tokens[start : start + 9]
            logits = made.model(row[None, :-1])[0].double()
            total += float(F.cross_entropy(logits, row[1:], reduction="sum"))
    assert made.valid_loss == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
    last = [row["valid_loss"] for row in made.history if "valid_loss" in row][-1]
    assert last == made.valid_loss


def test_a_text_to_evaluate_on_is_read_instead() -> None:
    other = words(80, seed=3)
    made = run(PLAIN, replace(SHORT, holdout=0.0), valid=other)
    tokens = torch.tensor([*other.encode(), 256])
    rows = [tokens[start : start + 9] for start in range(0, len(tokens) - 1, 8)]
    with torch.no_grad():
        total = sum(float(F.cross_entropy(made.model(r[None, :-1])[0].double(), r[1:], reduction="sum")) for r in rows)
    assert made.valid_loss == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
    assert run(PLAIN, replace(SHORT, holdout=0.0)).valid_loss is None


def test_the_evaluation_of_an_encoder_asks_for_what_was_hidden() -> None:
    made = run(MASKED, SHORT)
    assert isinstance(made.model.tokenizer, hw.Tokenizer)
    assert made.model.tokenizer.mask == 257
    tokens, total, asked = held_out(SHORT.holdout), 0.0, 0
    rows = [tokens[start : start + 9] for start in range(0, len(tokens) - 1, 8)]
    whole = torch.stack([row for row in rows if len(row) == 9])
    with torch.no_grad():
        ids, targets = masked(whole, SHORT.mask_share, 257, 258, [0])
        total = F.cross_entropy(made.model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
        asked = int((targets != IGNORE).sum())
    assert made.valid_loss == pytest.approx(float(total) / asked, rel=0.25)  # other tokens are hidden: alike, not equal


def test_rows_say_what_was_read() -> None:
    made = run(PLAIN, SHORT)
    logged = [row for row in made.history if "loss" in row]
    assert [row["step"] for row in logged] == [3, 6, 9, 12, 15, 18, 20]
    assert [row["tokens"] for row in logged] == [step * 4 * 8 for step in (3, 6, 9, 12, 15, 18, 20)]
    assert [row["step"] for row in made.history if "valid_loss" in row] == [7, 14, 20]
    assert (made.step, made.stopped, made.folder) == (20, "finished", None)


def test_the_model_in_the_folder_is_the_model(tmp_path: Path) -> None:
    made = run(NOISY, SHORT, tmp_path / "run")
    loaded = hw.load(tmp_path / "run" / "model")
    assert same_weights(loaded, made.model)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("dog") == list(b"dog")


# What cannot be.


def test_a_loss_that_bursts_is_told_and_no_checkpoint_is_spoilt(tmp_path: Path) -> None:
    recipe = replace(SHORT, rate=1e6, steps=60, warmup=0, log_every=10, save_every=3, keep=100)
    with pytest.raises(HeadwiseError, match="lower the rate"):
        run(PLAIN, recipe, tmp_path / "run")
    for step in there(tmp_path / "run"):
        weights = load_file(checkpoint(tmp_path / "run", step) / "model.safetensors")
        assert all(bool(value.isfinite().all()) for value in weights.values()), f"step {step}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "nonsense"}, "nonsense"),
        ({"device": "cuda:77"}, "cuda:77"),
        ({"every": 0}, "every"),
        ({"tokenizer": "nonsense"}, "no tokenizer 'nonsense'"),
        ({"text": "abc"}, "3|4.*tokens"),
        ({"text": ""}, "empty"),
        ({"text": []}, "empty"),
        ({"recipe": replace(SHORT, objective="masked")}, "masked objective"),
        ({"recipe": replace(SHORT, context=9)}, "context of 9"),
        ({"recipe": replace(SHORT, holdout=0.0001)}, "held out"),
        ({"spec": "nano"}, "ModelSpec"),
        ({"spec": replace(PLAIN, output="none")}, "output"),
    ],
)
def test_what_cannot_be_is_told(wrong: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"spec": PLAIN, "recipe": SHORT, **wrong}
    with pytest.raises(HeadwiseError, match=message):
        run(asked.pop("spec"), asked.pop("recipe"), **asked)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"steps": 0}, {"steps": 2.0}, {"steps": True}, {"batch": 0}, {"accumulate": 0}, {"accumulate": 3}),
        *({"rate": 0}, {"rate": -1.0}, {"rate": math.nan}, {"rate": math.inf}, {"rate": "fast"}, {"warmup": -1}),
        *({"floor": 1.5}, {"holdout": 1.0}, {"mask_share": -0.1}, {"mask_share": math.nan}, {"objective": "both"}),
        *({"precision": "float8"}, {"seed": -1}, {"seed": 2**31}, {"seed": 1.5}, {"keep": 0}, {"compile": 1}),
        *({"clip": -1.0}, {"weight_decay": -0.1}, {"log_every": 0}, {"save_every": 0}, {"evaluate_every": 0}),
        *({"beta1": 1.0}, {"beta2": 1.0}, {"clip": math.nan}, {"weight_decay": math.nan}, {"patience": -1}),
    ],
)
def test_a_recipe_that_cannot_be_is_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(HeadwiseError, match=next(iter(wrong))):
        Recipe(**wrong)


# Tokenizers.


def test_a_tokenizer_that_does_not_suit_the_model_is_told() -> None:
    with pytest.raises(HeadwiseError, match="257 tokens, the model 20"):
        run(Transformer(replace(PLAIN, vocab=20)), SHORT, tokenizer=byte_tokenizer())


def test_a_model_keeps_the_tokenizer_it_was_trained_with(tmp_path: Path) -> None:
    model = Transformer(PLAIN)
    model.tokenizer = byte_tokenizer()
    made = run(model, SHORT, tmp_path / "run", tokenizer=character_tokenizer(TEXT))
    expected = character_tokenizer(TEXT).encode("dog")
    assert made.model.tokenizer is not None
    assert made.model.tokenizer.encode("dog") == expected
    loaded = hw.load(tmp_path / "run" / "model")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("dog") == expected


def test_a_new_models_vocabulary_is_its_tokenizers() -> None:
    made = run(PLAIN, SHORT, tokenizer="character")
    assert made.model.spec.vocab == len(set(TEXT)) + 2
    assert run(PLAIN, SHORT, tokenizer="bpe:300").model.spec.vocab == 300
    assert run(replace(PLAIN, vocab=3), SHORT).model.spec.vocab == 257


def test_a_request_is_the_call_in_one_object(tmp_path: Path) -> None:
    request = TrainRequest(PLAIN, TEXT, SHORT, out=tmp_path / "run", tokenizer="character")
    made = start(request, progress=False)
    assert same_weights(made.model, hw.train(PLAIN, TEXT, SHORT, tokenizer="character", progress=False).model)
    assert start(request, progress=False).step == made.step, "the same again is that run"
    told = made.to_dict()
    assert (told["steps"], told["valid_loss"], told["model"]) == (
        made.step,
        made.valid_loss,
        str(tmp_path / "run" / "model"),
    )


def test_without_a_text_the_little_language_is_read_a_document_a_row() -> None:
    spec = hw.preset("little").resized(layers=1, width=16, heads=2)
    request = TrainRequest(spec, recipe=replace(LITTLE, steps=3, batch=2, warmup=1))
    assert "6 documents" in request.texts.name
    assert request.held_out is not None
    assert "held-out" in request.held_out.name
    assert can_sit(start(request, progress=False).model)
    assert TrainRequest(spec).how == LITTLE


def test_a_call_comes_at_every_evaluation(tmp_path: Path) -> None:
    recipe, heard = replace(SHORT, steps=6, warmup=1, evaluate_every=4), []
    hw.train(
        PLAIN, TEXT, recipe, out=tmp_path / "run", call=lambda _, step: heard.append(step), every=None, progress=False
    )
    assert heard == [0, 4, 6]
