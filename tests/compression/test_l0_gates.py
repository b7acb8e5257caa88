"""Learned gates: the hard-concrete distribution against its closed forms; which heads learning finds; nothing left behind."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit

from headwise.analysis.ablation.importance import importance
from headwise.compression.l0_gates import LearnedGates, learn_gates
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address, AttentionSpec, ModelSpec, SiteAddress
from headwise.text.build_tokenizers import add_mask, word_tokenizer
from headwise.training import Recipe, train
from tests.analysis.constructed_heads import OUT, SCRATCH, WORDS, Built, blank
from tests.analysis.models import TEXTS, reading
from tests.contract.layers import MODELS

ONE, TWO = SiteAddress("", 0), SiteAddress("", 1)
HEADLESS = replace(MODELS["encoder"], output="none", form="pre")
DRAWS = 200_000
QUICK: dict[str, Any] = {"keep": 0.5, "steps": 12, "batch": 4}


# The distribution, from its definition: g = min(1, max(0, 1.2 σ((L + log α) / .33) − .1)), L logistic.


def gate(noise: float, log_alpha: float) -> float:
    return min(1.0, max(0.0, 1.2 * float(expit((noise + log_alpha) / 0.33)) - 0.1))


@pytest.mark.parametrize("log_alpha", [-3.0, -0.7, 0.0, 1.3, 4.0])
def test_drawn_gates_are_shut_and_wide_open_as_often_as_they_should(log_alpha: float) -> None:
    torch.manual_seed(0)
    drawn = LearnedGates({ONE: 2}, start=log_alpha).sample(DRAWS // 2)[ONE]
    assert drawn.shape == (DRAWS // 2, 2)
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    edge = 0.33 * math.log(11)  # g is 0 where L + log α lies below −edge, 1 where it lies above edge
    shut, wide = float(expit(-edge - log_alpha)), float(expit(log_alpha - edge))
    for seen, chance in (((drawn == 0), shut), ((drawn == 1), wide)):
        assert abs(seen.float().mean().item() - chance) < 4 * math.sqrt(chance * (1 - chance) / DRAWS)


def test_the_chance_to_be_open_is_that_of_drawn_gates() -> None:
    gates = LearnedGates({ONE: 3})
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-2.0, 0.0, 2.0]))
    wanted = 1 - expit(-0.33 * math.log(11) - np.array([-2.0, 0.0, 2.0]))
    np.testing.assert_allclose(gates.open_chance().detach().numpy(), wanted, atol=1e-6)
    assert gates.open_share().item() == pytest.approx(wanted.mean(), abs=1e-6)
    assert gates.open_chance()[1].item() == pytest.approx(0.688, abs=5e-4)


def test_the_gate_without_chance_is_zero_below_its_threshold_one_above_and_half_in_the_middle() -> None:
    gates = LearnedGates({ONE: 6, TWO: 1})
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-2.399, -2.397, 0.0, 2.397, 2.399, -9.0, 9.0]))
    made = gates.evaluation()
    shut, ajar, half, near, wide, closed = made[ONE].tolist()
    assert (shut, closed, wide, made[TWO].item()) == (0, 0, 1, 1)
    assert 0 < ajar < 1e-3 < 1 - 1e-3 < near < 1
    assert half == pytest.approx(0.5)


@pytest.mark.parametrize("log_alpha", [-1.0, 0.0, 1.5])
def test_the_slope_of_drawn_gates_is_that_of_their_expectation(log_alpha: float) -> None:
    torch.manual_seed(0)
    gates = LearnedGates({ONE: 1}, start=log_alpha)
    drawn = gates.sample(DRAWS)[ONE][:, 0]  # (DRAWS,)
    (drawn.square().mean()).backward()

    def expected(at: float) -> float:
        made = quad(lambda noise: gate(noise, at) ** 2 * expit(noise) * expit(-noise), -30, 30, limit=400)
        return float(made[0])

    slope = (expected(log_alpha + 1e-3) - expected(log_alpha - 1e-3)) / 2e-3
    assert gates.log_alpha.grad is not None
    assert gates.log_alpha.grad.item() == pytest.approx(slope, abs=0.004)  # 4 standard deviations


def test_each_text_draws_its_own_gates_and_each_layer_gets_its_part() -> None:
    torch.manual_seed(0)
    gates = LearnedGates({ONE: 2, TWO: 30, SiteAddress("", 2): 0}, start=0.0)
    drawn = gates.sample(4)
    assert [tuple(gate.shape) for gate in drawn.values()] == [(4, 2), (4, 30), (4, 0)]
    assert len({tuple(row) for row in drawn[TWO].tolist()}) == 4


def test_all_log_alphas_are_moved_alike_to_a_share() -> None:
    gates = LearnedGates({ONE: 5})
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-5.0, -1.0, 0.0, 2.0, 7.0]))
    for share in (0.9, 0.31, 0.6):
        gates.set_open_share(share)
        assert gates.open_share().item() == pytest.approx(share, abs=1e-5)
        np.testing.assert_allclose(gates.log_alpha.detach().diff(), [4, 1, 2, 5], atol=1e-4)


# What is found.


def kept(scores: dict[Address, float], share: float) -> set[str]:
    ranked = sorted(scores, key=lambda head: -scores[head])
    return {str(head) for head in ranked[: round(share * len(ranked))]}


def rounds(count: int, seed: int = 0) -> list[str]:
    """Texts in which three words come round again and again: each word was said three places before."""
    dice = np.random.default_rng(seed)
    return [" ".join(list(dice.choice(WORDS, 3, replace=False)) * 8) for _ in range(count)]


def test_two_heads_that_do_the_work_are_found_among_six() -> None:
    model = blank(heads=6, layers=1)
    (layer,) = model.attention_layers()
    for number in (1, 4):
        Built(layer, number).places(2).writes(OUT, 0.3)  # the word two back comes next; each of the two says it softly
    Built(layer, 2).places(0).writes(SCRATCH, 0.0)  # looks, and writes nothing
    scores = learn_gates(model, rounds(40), keep=1 / 3, steps=40, rate=0.2)
    assert kept(scores, 1 / 3) == {"0.1", "0.4"}
    assert sum(scores.values()) / 6 == pytest.approx(1 / 3, abs=1e-3)
    for head, score in scores.items():
        assert score > 0.9 if str(head) in ("0.1", "0.4") else score < 0.1


GROUPED = ModelSpec(vocab=1, context=24, layers=1, attention=AttentionSpec(width=32, heads=4, kv_heads=2))
MASKED = replace(GROUPED, kind="encoder", output="mlm", attention=AttentionSpec(width=32, heads=4))
USELESS = "0.0,0.2"


@pytest.mark.parametrize("spec", [GROUPED, MASKED])
def test_heads_that_learned_close_last_and_those_that_write_nothing_first(spec: ModelSpec) -> None:
    tokenizer = add_mask(word_tokenizer(WORDS))
    model = Transformer(replace(spec, vocab=len(tokenizer)))
    model.tokenizer = tokenizer
    with model.heads[USELESS].silenced():  # all that is learned, the others learn
        recipe = Recipe(steps=300, batch=16, rate=1e-2, warmup=20, rows="texts", mask_share=0.15, evaluate_every=300)
        train(model, rounds(800), recipe, progress=False)
    with torch.no_grad():
        for head in model.heads.select(USELESS):
            head.W_O.zero_()
    texts = rounds(60, seed=1)
    worth = {head.head: head.worth for head in importance(model, texts, how="zero")}
    assert min(worth["0.1"], worth["0.3"]) > 0.1 > 1e-6 > abs(worth["0.0"])  # as built
    scores = learn_gates(model, texts, keep=0.5, steps=60, rate=0.2)
    assert kept(scores, 0.5) == {"0.1", "0.3"}
    assert sum(scores.values()) == pytest.approx(2, abs=1e-3)


def test_a_model_without_output_keeps_the_heads_that_move_its_state() -> None:
    model, useless = reading(HEADLESS), "0.1,0.2,1.0,1.3"
    with torch.no_grad():
        for head in model.heads.select(useless):
            head.W_O.zero_()
    scores = learn_gates(model, TEXTS, keep=0.5, steps=80, rate=0.2)
    assert kept(scores, 0.5) == {"0.0", "0.3", "1.1", "1.2"}
    assert sum(scores.values()) == pytest.approx(4, abs=1e-3)


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_all_may_close_or_all_stay(keep: float) -> None:
    scores = learn_gates(reading(MODELS["decoder"]), TEXTS, keep=keep, steps=12, batch=4)
    assert list(scores.values()) == pytest.approx([keep] * 8, abs=1e-3)


# What is left behind: nothing.


def state_of(model: Transformer) -> list[Any]:
    """Everything that must stay: bits, flags, gradients, modes, and the random numbers of others."""
    values = [(value.detach().clone(), value.requires_grad, value.grad) for value in model.parameters()]
    grads = [None if grad is None else grad.clone() for _, _, grad in values]
    return [values, grads, [part.training for part in model.modules()], torch.random.get_rng_state()]


def assert_same(before: list[Any], after: list[Any]) -> None:
    for (bits, flag, grad), kept_grad, (now, flag_now, grad_now) in zip(before[0], before[1], after[0], strict=True):
        assert torch.equal(bits, now)
        assert flag == flag_now
        assert grad is grad_now
        assert grad is None or torch.equal(kept_grad, grad_now)
    assert before[2] == after[2]
    assert torch.equal(before[3], after[3])


def lived_in(spec: Any) -> Transformer:
    """A model that somebody was training: gradients in it, one weight frozen, one part resting."""
    model = reading(spec, dropout=0.2).train()
    first, *_, last = model.parameters()
    first.requires_grad_(False)
    last.grad = torch.ones_like(last)
    model.blocks[0].eval()
    return model


@pytest.mark.parametrize("spec", [MODELS["decoder, rotary"], MODELS["decoder, cut"], MODELS["encoder"], HEADLESS])
def test_the_model_is_as_it_was_bit_by_bit(spec: Any) -> None:
    model = lived_in(spec)
    before = state_of(model)
    scores = learn_gates(model, TEXTS, **QUICK)
    assert_same(before, state_of(model))
    assert list(scores) == list(model.spec.addresses)
    assert sum(scores.values()) / len(scores) == pytest.approx(0.5, abs=1e-3)


def test_the_model_is_as_it_was_after_an_interrupt() -> None:
    def stop(what: str, done: int, of: int | None) -> None:
        assert (what, of) == ("gates", 12)
        if done == 3:
            raise KeyboardInterrupt

    model = lived_in(MODELS["decoder"])
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        learn_gates(model, TEXTS, **QUICK, progress=stop)
    assert_same(before, state_of(model))


def test_a_seed_decides_everything() -> None:
    model = reading(MODELS["decoder"])
    one, again, other = (learn_gates(model, TEXTS, **QUICK, seed=seed) for seed in (3, 3, 4))
    assert one == again
    assert one != other


@pytest.mark.parametrize("spec", [MODELS["decoder"], HEADLESS])
def test_weights_learn_along_only_when_asked_and_frozen_ones_never(spec: Any) -> None:
    model = lived_in(spec)
    before = state_of(model)
    again = learn_gates(lived_in(spec), TEXTS, **QUICK, weights=True)
    assert learn_gates(model, TEXTS, **QUICK, weights=True) == again
    after = state_of(model)
    changed = [not torch.equal(old[0], new[0]) for old, new in zip(before[0], after[0], strict=True)]
    assert not changed[0]  # the frozen one
    assert sum(changed) > len(changed) / 2
    assert [value[1:] for value in before[0]] == [value[1:] for value in after[0]]  # flags and gradients are as before
    assert before[2] == after[2]


# What is refused.


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"keep": 1.5}, "from 0 to 1"),
        ({"steps": 0}, "at least 1"),
        ({"batch": 0}, "at least 1"),
        ({"rate": 0.0}, "above 0"),
        ({"context": 65}, "positions of the model"),
    ],
)
def test_wrong_numbers_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(HeadwiseError, match=told):
        learn_gates(reading(MODELS["decoder"]), TEXTS, **(QUICK | wrong))


def broken() -> Transformer:
    model = reading(MODELS["decoder"])
    with torch.no_grad():
        for head in model.heads.select("0.1"):
            head.W_O.fill_(math.nan)
    return model


@pytest.mark.parametrize(
    ("make", "corpus", "told"),
    [
        (lambda: reading(MODELS["decoder"]), "", "empty"),
        (lambda: reading(MODELS["decoder"]), [], "empty"),
        (lambda: reading(MODELS["decoder"]), ["a", "t"], "long enough"),
        (lambda: reading(MODELS["encoder-decoder"]), TEXTS, "needs pairs"),
        (lambda: reading(MODELS["decoder"].without("*")), TEXTS, "no heads"),
        (lambda: Transformer(MODELS["decoder"]), TEXTS, "no tokenizer"),
        (broken, TEXTS, "finite"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(make: Callable[[], Transformer], corpus: Any, told: str) -> None:
    with pytest.raises(HeadwiseError, match=told):
        learn_gates(make(), corpus, **QUICK)
