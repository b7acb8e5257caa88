"""Training steps against plain torch code."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import ModelSpec
from headwise.training import Recipe
from headwise.training.batch_samplers import ShuffledWindowSampler
from headwise.training.optimizer import make_optimizer, optimizer_state, restore_optimizer, trainable_parameters
from tests.training.tiny import MASKED, NOISY, ODD, PLAIN, TEXT, max_weight_difference, run


def expected_rate(recipe: Recipe, step: int) -> float:
    """Step t of w warmup steps has (t+1)/(w+1) of the rate, then half a cosine from 1 to the final rate at the last step."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / (recipe.warmup + 1)
    span = recipe.steps - 1 - recipe.warmup
    angle = math.pi * (step - recipe.warmup) / span if span > 0 else (math.pi if step > recipe.warmup else 0.0)
    low = recipe.learning_rate * recipe.final_lr_fraction
    return low + (recipe.learning_rate - low) * math.cos(angle / 2) ** 2


@given(st.integers(1, 300), st.integers(0, 120), st.floats(0, 1), st.floats(1e-5, 1.0))
def test_rate_at_linear_warmup_then_cosine_decay(steps: int, warmup: int, floor: float, rate: float) -> None:
    recipe = Recipe(steps=steps, warmup=warmup, final_lr_fraction=floor, learning_rate=rate)
    for step in {0, 1, warmup - 1, warmup, warmup + 1, steps // 2, steps - 2, steps - 1}:
        if 0 <= step < steps:
            assert recipe.learning_rate_at(step) == pytest.approx(expected_rate(recipe, step), rel=1e-9, abs=1e-15)
            assert 0 <= recipe.learning_rate_at(step) <= rate * (1 + 1e-12)


def test_rate_at_known_steps_equals_closed_form() -> None:
    recipe = Recipe(steps=101, warmup=20, learning_rate=2.0, final_lr_fraction=0.25)
    assert recipe.learning_rate_at(20) == 2.0
    assert recipe.learning_rate_at(60) == pytest.approx(1.25)  # half-way between 2 and 0.5
    assert recipe.learning_rate_at(100) == pytest.approx(0.5)
    assert replace(recipe, final_lr_fraction=1.0).learning_rate_at(70) == 2.0


@pytest.mark.parametrize("spec", [PLAIN, ODD, MASKED])
def test_make_optimizer_decays_only_matrices(spec: ModelSpec) -> None:
    model = Transformer(spec)
    optimizer = make_optimizer(dict(trainable_parameters(model)), Recipe(weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    counted = sum(len(group["params"]) for group in optimizer.param_groups)
    assert counted == len(decays) == len(list(model.parameters()))  # each parameter once, including tied ones
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            matrix = isinstance(module, nn.Linear | nn.Embedding) and name == "weight"
            if matrix:
                assert decays[id(value)] == 0.3
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm) or name == "bias" or value.ndim < 2:
                assert decays[id(value)] == 0.0, name


def train_plain_torch(spec: ModelSpec, recipe: Recipe) -> Transformer:
    """Train without the loop: full logits, one batch and plain AdamW."""
    torch.manual_seed(recipe.seed)
    model = Transformer(spec).train()
    tokens = torch.tensor([*TEXT.encode(), 256])
    num_held_out = int(len(tokens) * recipe.holdout)
    windows = ShuffledWindowSampler(tokens[: len(tokens) - num_held_out].numpy(), spec.context, recipe.seed)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2), fused=False, foreach=False)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = expected_rate(recipe, step)
        rows = torch.from_numpy(windows.training_rows(step * recipe.batch_size, recipe.batch_size))
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))  # type: ignore
        if recipe.max_grad_norm and grad_norm > recipe.max_grad_norm:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(float(recipe.max_grad_norm / grad_norm))
        optimizer.step()
    return model


NO_HEAD_DROPOUT = replace(ODD, attention=replace(ODD.attention, head_dropout=0.0))


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("spec", [PLAIN, NO_HEAD_DROPOUT])
def test_train_steps_equal_plain_torch(spec: ModelSpec, clip: float) -> None:
    recipe = Recipe(steps=1, batch_size=6, learning_rate=1e-2, warmup=0, max_grad_norm=clip, seed=3)
    assert max_weight_difference(run(spec, recipe).model, train_plain_torch(spec, recipe)) < 1e-6
    longer = replace(recipe, steps=8, warmup=2, learning_rate=1e-3)
    assert max_weight_difference(run(spec, longer).model, train_plain_torch(spec, longer)) < 1e-5


STEPS = Recipe(steps=10, batch_size=12, learning_rate=1e-3, warmup=2, seed=2, max_grad_norm=0.5)
NO_DROPOUT = replace(NOISY, dropout=0.0, attention=replace(NOISY.attention, dropout=0.0, head_dropout=0.0))


@pytest.mark.parametrize("parts", [2, 3, 12])
def test_train_accumulation_equals_full_batch(parts: int) -> None:
    full = run(NO_DROPOUT, STEPS)
    accumulated = run(NO_DROPOUT, replace(STEPS, accumulation_steps=parts))
    assert max_weight_difference(full.model, accumulated.model) < 1e-6
    assert accumulated.loss == pytest.approx(full.loss, rel=1e-5)


def test_train_masked_accumulation_equals_full_batch() -> None:
    spec = replace(NO_DROPOUT, kind="encoder", output="mlm")
    full, accumulated = run(spec, STEPS), run(spec, replace(STEPS, accumulation_steps=3))
    assert accumulated.loss == pytest.approx(full.loss, rel=1e-4)
    assert max_weight_difference(full.model, accumulated.model) < 1e-5


@pytest.mark.parametrize("spec", [NO_DROPOUT, NOISY, MASKED])
def test_train_checkpointing_equals_plain(spec: ModelSpec) -> None:
    assert max_weight_difference(run(spec, STEPS).model, run(spec, replace(STEPS, checkpointing=True)).model) < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # warnings of torch.compile
@pytest.mark.parametrize("spec", [NO_DROPOUT, replace(NO_DROPOUT, kind="encoder", output="mlm")])
def test_train_compile_equals_eager(spec: ModelSpec) -> None:
    assert max_weight_difference(run(spec, STEPS).model, run(spec, replace(STEPS, compile=True)).model) < 1e-5


def test_train_frozen_parameters_stay_unchanged() -> None:
    model = Transformer(PLAIN)
    model.embed.requires_grad_(False)
    before = deepcopy(model)
    after = run(model, STEPS).model
    assert torch.equal(after.embed.tokens.weight, before.embed.tokens.weight)
    assert max_weight_difference(after, before) > 1e-4
    model.requires_grad_(False)
    with pytest.raises(HeadwiseError, match="no trainable parameter"):
        run(model, STEPS)


def test_optimizer_state_restored_continues_exactly() -> None:
    model = Transformer(NO_HEAD_DROPOUT)
    optimizer = make_optimizer(dict(trainable_parameters(model)), STEPS)
    for _ in range(2):
        model(torch.arange(8)[None]).square().mean().backward()
        optimizer.step()
    state = {
        name: value.clone() for name, value in optimizer_state(dict(trainable_parameters(model)), optimizer).items()
    }
    twin = deepcopy(model)
    other = make_optimizer(dict(trainable_parameters(twin)), STEPS)
    restore_optimizer(dict(trainable_parameters(twin)), other, state)
    for network, adam in ((model, optimizer), (twin, other)):
        adam.zero_grad()
        network(torch.arange(8)[None]).square().mean().backward()
        adam.step()
    assert max_weight_difference(model, twin) == 0
