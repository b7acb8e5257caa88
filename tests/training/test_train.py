"""Training runs through the public API."""

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
from headwise.model.chunked_cross_entropy import IGNORE_INDEX
from headwise.text.build_tokenizers import byte_tokenizer, character_tokenizer
from headwise.training import Recipe, TrainRequest, run_request
from headwise.training.batch_samplers import masked_targets
from headwise.training.default_synthetic_run import DEFAULT_RECIPE
from headwise.training.synthetic_evaluation import supports_synthetic_eval
from tests.training.tiny import (
    MASKED,
    NOISY,
    PLAIN,
    SHORT,
    TEXT,
    checkpoint_folder,
    checkpoint_steps,
    drop_timing,
    random_words,
    run,
    same_weights,
)

# Callbacks.


@pytest.mark.parametrize(("interval", "expected"), [(6, [0, 6, 12, 18, 20]), (5, [0, 5, 10, 15, 20]), (50, [0, 20])])
def test_train_call_runs_at_interval(interval: int, expected: list[int]) -> None:
    steps: list[int] = []
    run(PLAIN, SHORT, callback=lambda model, step: steps.append(step), callback_every=interval)
    assert steps == expected


def draw_random_numbers(model: Transformer) -> None:
    torch.manual_seed(1)
    torch.rand(1000)


def switch_to_eval(model: Transformer) -> None:
    model.eval()
    model(torch.arange(8)[None])


def compute_gradient(model: Transformer) -> None:
    """Compute the gradient of a loss, as gradient importance does."""
    model(torch.arange(8)[None]).logsumexp(-1).mean().backward()


@pytest.mark.parametrize("look", [draw_random_numbers, switch_to_eval, compute_gradient])
def test_train_call_has_no_side_effects(look: Callable[[Transformer], None]) -> None:
    with_callback = run(NOISY, SHORT, callback=lambda model, step: look(model), callback_every=3)
    plain = run(NOISY, SHORT)
    assert drop_timing(with_callback.history) == drop_timing(plain.history)
    assert same_weights(with_callback.model, plain.model)


def test_train_call_receives_model_of_that_step() -> None:
    weights: dict[int, torch.Tensor] = {}
    result = run(
        PLAIN,
        SHORT,
        callback=lambda m, step: weights.update({step: m.embed.tokens.weight.clone().detach()}),
        callback_every=20,
    )
    torch.manual_seed(SHORT.seed)
    assert torch.equal(weights[0], Transformer(PLAIN).embed.tokens.weight)
    assert torch.equal(weights[20], result.model.embed.tokens.weight)


# Seeds.


def test_train_seed_determines_weights() -> None:
    first, same, other = (run(NOISY, replace(SHORT, seed=seed)) for seed in (1, 1, 2))
    assert same_weights(first.model, same.model)
    assert not same_weights(first.model, other.model)


def test_train_global_rng_is_unchanged() -> None:
    torch.manual_seed(11)
    expected = torch.rand(5)
    torch.manual_seed(11)
    run(NOISY, SHORT, callback=lambda model, step: torch.rand(3))
    assert torch.equal(torch.rand(5), expected)
    torch.manual_seed(12)  # the global seed has no effect
    assert same_weights(run(NOISY, SHORT).model, run(NOISY, SHORT).model)


# Learning.


def test_train_periodic_text_loss_near_zero() -> None:
    recipe = Recipe(steps=150, batch_size=8, learning_rate=1e-2, warmup=10, holdout=0.2)
    result = run(PLAIN, recipe, text="abcd" * 200, tokenizer="character")
    first = run(PLAIN, replace(recipe, steps=1), text="abcd" * 200, tokenizer="character")
    assert first.loss == pytest.approx(math.log(6), abs=0.3)  # a uniform prediction over six tokens
    assert result.loss < 0.05
    assert result.valid_loss is not None
    assert result.valid_loss < 0.1


def test_train_random_bits_loss_equals_entropy() -> None:
    rng = random.Random(0)
    text = "".join(rng.choice("ab") for _ in range(6000))
    result = run(
        PLAIN, Recipe(steps=200, batch_size=16, learning_rate=3e-3, warmup=10), text=text, tokenizer="character"
    )
    assert result.valid_loss == pytest.approx(math.log(2), abs=0.05)


def held_out_tokens(fraction: float) -> torch.Tensor:
    tokens = torch.tensor([*TEXT.encode(), 256])
    return tokens[len(tokens) - int(len(tokens) * fraction) :]


def test_train_valid_loss_covers_all_held_out_tokens() -> None:
    result = run(NOISY, SHORT)
    tokens, total = held_out_tokens(SHORT.holdout), 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 8):
            row = tokens[start : start + 9]
            logits = result.model(row[None, :-1])[0].double()
            total += float(F.cross_entropy(logits, row[1:], reduction="sum"))
    assert result.valid_loss == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
    last = [row["valid_loss"] for row in result.history if "valid_loss" in row][-1]
    assert last == result.valid_loss


def test_train_valid_text_replaces_holdout() -> None:
    valid_text = random_words(80, seed=3)
    result = run(PLAIN, replace(SHORT, holdout=0.0), valid=valid_text)
    tokens = torch.tensor([*valid_text.encode(), 256])
    rows = [tokens[start : start + 9] for start in range(0, len(tokens) - 1, 8)]
    with torch.no_grad():
        total = sum(
            float(F.cross_entropy(result.model(r[None, :-1])[0].double(), r[1:], reduction="sum")) for r in rows
        )
    assert result.valid_loss == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
    assert run(PLAIN, replace(SHORT, holdout=0.0)).valid_loss is None


def test_train_masked_valid_loss_covers_masked_tokens() -> None:
    result = run(MASKED, SHORT)
    assert isinstance(result.model.tokenizer, hw.Tokenizer)
    assert result.model.tokenizer.mask == 257
    tokens, total, num_targets = held_out_tokens(SHORT.holdout), 0.0, 0
    rows = [tokens[start : start + 9] for start in range(0, len(tokens) - 1, 8)]
    full_rows = torch.stack([row for row in rows if len(row) == 9])
    with torch.no_grad():
        ids, targets = masked_targets(full_rows, SHORT.mask_fraction, 257, 258, [0])
        total = F.cross_entropy(
            result.model(ids).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        num_targets = int((targets != IGNORE_INDEX).sum())
    # Other tokens are masked, so the losses are similar but not equal.
    assert result.valid_loss == pytest.approx(float(total) / num_targets, rel=0.25)


def test_train_history_rows_have_steps_and_tokens() -> None:
    result = run(PLAIN, SHORT)
    logged = [row for row in result.history if "loss" in row]
    assert [row["step"] for row in logged] == [3, 6, 9, 12, 15, 18, 20]
    assert [row["tokens"] for row in logged] == [step * 4 * 8 for step in (3, 6, 9, 12, 15, 18, 20)]
    assert [row["step"] for row in result.history if "valid_loss" in row] == [7, 14, 20]
    assert (result.step, result.stop_reason, result.folder) == (20, "finished", None)


def test_train_saved_model_equals_result(tmp_path: Path) -> None:
    result = run(NOISY, SHORT, tmp_path / "run")
    loaded = hw.load(tmp_path / "run" / "model")
    assert same_weights(loaded, result.model)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("dog") == list(b"dog")


# Errors.


def test_train_diverging_loss_raises_and_checkpoints_stay_finite(tmp_path: Path) -> None:
    recipe = replace(SHORT, learning_rate=1e6, steps=60, warmup=0, log_every=10, save_every=3, keep_checkpoints=100)
    with pytest.raises(HeadwiseError, match="Lower the learning rate"):
        run(PLAIN, recipe, tmp_path / "run")
    for step in checkpoint_steps(tmp_path / "run"):
        weights = load_file(checkpoint_folder(tmp_path / "run", step) / "model.safetensors")
        assert all(bool(value.isfinite().all()) for value in weights.values()), f"step {step}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "nonsense"}, "nonsense"),
        ({"device": "cuda:77"}, "cuda:77"),
        ({"callback_every": 0}, "callback_every"),
        ({"tokenizer": "nonsense"}, "Got 'nonsense'"),
        ({"text": "abc"}, "3|4.*tokens"),
        ({"text": ""}, "empty"),
        ({"text": []}, "empty"),
        ({"recipe": replace(SHORT, objective="masked")}, "'masked' does not suit"),
        ({"recipe": replace(SHORT, context=9)}, "learned positions. Got 9"),
        ({"recipe": replace(SHORT, holdout=0.0001)}, "held out"),
        ({"spec": "nano"}, "ModelSpec"),
        ({"spec": replace(PLAIN, output="none")}, "output"),
    ],
)
def test_train_invalid_arguments_raise(wrong: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"spec": PLAIN, "recipe": SHORT, **wrong}
    with pytest.raises(HeadwiseError, match=message):
        run(arguments.pop("spec"), arguments.pop("recipe"), **arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"steps": 0}, {"steps": 2.0}, {"steps": True}, {"batch_size": 0}),
        *({"accumulation_steps": 0}, {"accumulation_steps": 3}),
        *({"learning_rate": 0}, {"learning_rate": -1.0}, {"learning_rate": math.nan}, {"learning_rate": math.inf}),
        *({"learning_rate": "fast"}, {"warmup": -1}),
        *({"final_lr_fraction": 1.5}, {"holdout": 1.0}, {"mask_fraction": -0.1}, {"mask_fraction": math.nan}),
        {"objective": "both"},
        *(
            {"precision": "float8"},
            {"seed": -1},
            {"seed": 2**31},
            {"seed": 1.5},
            {"keep_checkpoints": 0},
            {"compile": 1},
        ),
        *({"max_grad_norm": -1.0}, {"weight_decay": -0.1}, {"log_every": 0}, {"save_every": 0}, {"evaluate_every": 0}),
        *({"beta1": 1.0}, {"beta2": 1.0}, {"max_grad_norm": math.nan}, {"weight_decay": math.nan}, {"patience": -1}),
    ],
)
def test_recipe_invalid_field_raises(wrong: dict[str, Any]) -> None:
    with pytest.raises(HeadwiseError, match=next(iter(wrong))):
        Recipe(**wrong)


# Tokenizers.


def test_train_tokenizer_vocab_mismatch_raises() -> None:
    with pytest.raises(HeadwiseError, match="257 tokens, the model 20"):
        run(Transformer(replace(PLAIN, vocab=20)), SHORT, tokenizer=byte_tokenizer())


def test_train_model_keeps_training_tokenizer(tmp_path: Path) -> None:
    model = Transformer(PLAIN)
    model.tokenizer = byte_tokenizer()
    result = run(model, SHORT, tmp_path / "run", tokenizer=character_tokenizer(TEXT))
    expected = character_tokenizer(TEXT).encode("dog")
    assert result.model.tokenizer is not None
    assert result.model.tokenizer.encode("dog") == expected
    loaded = hw.load(tmp_path / "run" / "model")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("dog") == expected


def test_train_new_model_vocab_follows_tokenizer() -> None:
    result = run(PLAIN, SHORT, tokenizer="character")
    assert result.model.spec.vocab == len(set(TEXT)) + 2
    assert run(PLAIN, SHORT, tokenizer="bpe:300").model.spec.vocab == 300
    assert run(replace(PLAIN, vocab=3), SHORT).model.spec.vocab == 257


def test_train_request_equals_train_call(tmp_path: Path) -> None:
    request = TrainRequest(PLAIN, TEXT, SHORT, out=tmp_path / "run", tokenizer="character")
    result = run_request(request, progress=False)
    assert same_weights(result.model, hw.train(PLAIN, TEXT, SHORT, tokenizer="character", progress=False).model)
    assert run_request(request, progress=False).step == result.step, "the same request returns the finished run"
    fields = result.to_dict()
    assert (fields["steps"], fields["valid_loss"], fields["model"]) == (
        result.step,
        result.valid_loss,
        str(tmp_path / "run" / "model"),
    )


def test_train_without_text_uses_synthetic_language() -> None:
    spec = hw.preset("synthetic").resized(layers=1, width=16, heads=2)
    request = TrainRequest(spec, recipe=replace(DEFAULT_RECIPE, steps=3, batch_size=2, warmup=1))
    assert "6 documents" in request.train_corpus.name
    assert request.valid_corpus is not None
    assert "held-out" in request.valid_corpus.name
    assert supports_synthetic_eval(run_request(request, progress=False).model)
    assert TrainRequest(spec).resolved_recipe == DEFAULT_RECIPE


def test_train_call_without_interval_runs_at_evaluations(tmp_path: Path) -> None:
    recipe, steps = replace(SHORT, steps=6, warmup=1, evaluate_every=4), []
    hw.train(
        PLAIN,
        TEXT,
        recipe,
        out=tmp_path / "run",
        callback=lambda _, step: steps.append(step),
        callback_every=None,
        progress=False,
    )
    assert steps == [0, 4, 6]
