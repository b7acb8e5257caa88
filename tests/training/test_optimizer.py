"""One step of training beside the same written out in plain torch."""

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
from headwise.training.batches import Windows
from headwise.training.optimizer import make_optimizer, optimizer_state, restore_optimizer, trainable
from tests.training.tiny import MASKED, NOISY, ODD, PLAIN, TEXT, distance, run


def expected_rate(recipe: Recipe, step: int) -> float:
    """Step t of w warm-up steps has (t+1)/(w+1) of the rate; then half a cosine from 1 to the floor at the last step."""
    if step < recipe.warmup:
        return recipe.rate * (step + 1) / (recipe.warmup + 1)
    span = recipe.steps - 1 - recipe.warmup
    angle = math.pi * (step - recipe.warmup) / span if span > 0 else (math.pi if step > recipe.warmup else 0.0)
    low = recipe.rate * recipe.floor
    return low + (recipe.rate - low) * math.cos(angle / 2) ** 2


@given(st.integers(1, 300), st.integers(0, 120), st.floats(0, 1), st.floats(1e-5, 1.0))
def test_the_rate_climbs_in_a_line_and_falls_in_a_cosine(steps: int, warmup: int, floor: float, rate: float) -> None:
    recipe = Recipe(steps=steps, warmup=warmup, floor=floor, rate=rate)
    for step in {0, 1, warmup - 1, warmup, warmup + 1, steps // 2, steps - 2, steps - 1}:
        if 0 <= step < steps:
            assert recipe.rate_at(step) == pytest.approx(expected_rate(recipe, step), rel=1e-9, abs=1e-15)
            assert 0 <= recipe.rate_at(step) <= rate * (1 + 1e-12)


def test_the_rate_at_its_landmarks() -> None:
    recipe = Recipe(steps=101, warmup=20, rate=2.0, floor=0.25)
    assert recipe.rate_at(20) == 2.0
    assert recipe.rate_at(60) == pytest.approx(1.25)  # half-way between 2 and 0.5
    assert recipe.rate_at(100) == pytest.approx(0.5)
    assert replace(recipe, floor=1.0).rate_at(70) == 2.0


@pytest.mark.parametrize("spec", [PLAIN, ODD, MASKED])
def test_matrices_decay_and_biases_norms_and_gates_do_not(spec: ModelSpec) -> None:
    model = Transformer(spec)
    optimizer = make_optimizer(dict(trainable(model)), Recipe(weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    counted = sum(len(group["params"]) for group in optimizer.param_groups)
    assert counted == len(decays) == len(list(model.parameters()))  # each once, tied ones too
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            matrix = isinstance(module, nn.Linear | nn.Embedding) and name == "weight"
            if matrix:
                assert decays[id(value)] == 0.3
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm) or name == "bias" or value.ndim < 2:
                assert decays[id(value)] == 0.0, name


def by_hand(spec: ModelSpec, recipe: Recipe) -> Transformer:
    """The run without any of the loop: full logits, one batch, plain AdamW, written as a textbook would."""
    torch.manual_seed(recipe.seed)
    model = Transformer(spec).train()
    tokens = torch.tensor([*TEXT.encode(), 256])
    held = int(len(tokens) * recipe.holdout)
    windows = Windows(tokens[: len(tokens) - held].numpy(), spec.context, recipe.seed)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2), fused=False, foreach=False)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = expected_rate(recipe, step)
        rows = torch.from_numpy(windows.rows(step * recipe.batch, recipe.batch))
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        length = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters() if p.grad is not None))  # type: ignore
        if recipe.clip and length > recipe.clip:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(float(recipe.clip / length))
        optimizer.step()
    return model


QUIET = replace(ODD, attention=replace(ODD.attention, head_dropout=0.0))


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("spec", [PLAIN, QUIET])
def test_steps_are_those_of_plain_torch(spec: ModelSpec, clip: float) -> None:
    recipe = Recipe(steps=1, batch=6, rate=1e-2, warmup=0, clip=clip, seed=3)
    assert distance(run(spec, recipe).model, by_hand(spec, recipe)) < 1e-6
    more = replace(recipe, steps=8, warmup=2, rate=1e-3)
    assert distance(run(spec, more).model, by_hand(spec, more)) < 1e-5


STEPS = Recipe(steps=10, batch=12, rate=1e-3, warmup=2, seed=2, clip=0.5)
STILL = replace(NOISY, dropout=0.0, attention=replace(NOISY.attention, dropout=0.0, head_dropout=0.0))


@pytest.mark.parametrize("parts", [2, 3, 12])
def test_accumulation_changes_nothing(parts: int) -> None:
    whole = run(STILL, STEPS)
    cut = run(STILL, replace(STEPS, accumulate=parts))
    assert distance(whole.model, cut.model) < 1e-6
    assert cut.loss == pytest.approx(whole.loss, rel=1e-5)


def test_accumulation_changes_nothing_where_tokens_are_hidden() -> None:
    spec = replace(STILL, kind="encoder", output="mlm")
    whole, cut = run(spec, STEPS), run(spec, replace(STEPS, accumulate=3))
    assert cut.loss == pytest.approx(whole.loss, rel=1e-4)
    assert distance(whole.model, cut.model) < 1e-5


@pytest.mark.parametrize("spec", [STILL, NOISY, MASKED])
def test_recomputing_changes_nothing(spec: ModelSpec) -> None:
    assert distance(run(spec, STEPS).model, run(spec, replace(STEPS, checkpointing=True)).model) < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own, about what it looks at
@pytest.mark.parametrize("spec", [STILL, replace(STILL, kind="encoder", output="mlm")])
def test_compiling_changes_nothing(spec: ModelSpec) -> None:
    assert distance(run(spec, STEPS).model, run(spec, replace(STEPS, compile=True)).model) < 1e-5


def test_frozen_parameters_stay() -> None:
    model = Transformer(PLAIN)
    model.embed.requires_grad_(False)
    before = deepcopy(model)
    after = run(model, STEPS).model
    assert torch.equal(after.embed.tokens.weight, before.embed.tokens.weight)
    assert distance(after, before) > 1e-4
    model.requires_grad_(False)
    with pytest.raises(HeadwiseError, match="no parameter"):
        run(model, STEPS)


def test_the_optimizer_goes_through_a_file_and_back() -> None:
    model = Transformer(QUIET)
    optimizer = make_optimizer(dict(trainable(model)), STEPS)
    for _ in range(2):
        model(torch.arange(8)[None]).square().mean().backward()
        optimizer.step()
    state = {name: value.clone() for name, value in optimizer_state(dict(trainable(model)), optimizer).items()}
    twin = deepcopy(model)
    other = make_optimizer(dict(trainable(twin)), STEPS)
    restore_optimizer(dict(trainable(twin)), other, state)
    for made, best in ((model, optimizer), (twin, other)):
        best.zero_grad()
        made(torch.arange(8)[None]).square().mean().backward()
        best.step()
    assert distance(model, twin) == 0
