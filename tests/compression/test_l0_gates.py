"""Learned gates: the hard-concrete distribution against its closed forms, selected heads, and restored model state."""

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
from headwise.spec import Address, AttentionSpec, LayerAddress, ModelSpec
from headwise.text.build_tokenizers import add_mask_token, word_tokenizer
from headwise.training import Recipe, train
from tests.analysis.constructed_heads import OUT, SCRATCH, WORDS, HeadBuilder, blank_model
from tests.analysis.models import TEXTS, character_model
from tests.contract.layers import MODELS

LAYER_0, LAYER_1 = LayerAddress("", 0), LayerAddress("", 1)
HEADLESS = replace(MODELS["encoder"], output="none", norm_placement="pre")
DRAWS = 200_000
QUICK: dict[str, Any] = {"keep": 0.5, "steps": 12, "batch": 4}


# The distribution by definition: g = min(1, max(0, 1.2 σ((L + log α) / 0.33) − 0.1)), L logistic.


def hard_concrete_gate(noise: float, log_alpha: float) -> float:
    return min(1.0, max(0.0, 1.2 * float(expit((noise + log_alpha) / 0.33)) - 0.1))


@pytest.mark.parametrize("log_alpha", [-3.0, -0.7, 0.0, 1.3, 4.0])
def test_learned_gates_sample_matches_closed_form_probabilities(log_alpha: float) -> None:
    torch.manual_seed(0)
    samples = LearnedGates({LAYER_0: 2}, initial_log_alpha=log_alpha).sample(DRAWS // 2)[LAYER_0]
    assert samples.shape == (DRAWS // 2, 2)
    assert samples.min() >= 0
    assert samples.max() <= 1
    edge = 0.33 * math.log(11)  # g is 0 if L + log α is below −edge, and 1 if it is above edge
    p_closed, p_open = float(expit(-edge - log_alpha)), float(expit(log_alpha - edge))
    for event, probability in (((samples == 0), p_closed), ((samples == 1), p_open)):
        assert abs(event.float().mean().item() - probability) < 4 * math.sqrt(probability * (1 - probability) / DRAWS)


def test_open_chance_equals_closed_form() -> None:
    gates = LearnedGates({LAYER_0: 3})
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-2.0, 0.0, 2.0]))
    expected = 1 - expit(-0.33 * math.log(11) - np.array([-2.0, 0.0, 2.0]))
    np.testing.assert_allclose(gates.open_probability().detach().numpy(), expected, atol=1e-6)
    assert gates.open_fraction().item() == pytest.approx(expected.mean(), abs=1e-6)
    assert gates.open_probability()[1].item() == pytest.approx(0.688, abs=5e-4)


def test_evaluation_gates_zero_half_one_by_threshold() -> None:
    gates = LearnedGates({LAYER_0: 6, LAYER_1: 1})
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-2.399, -2.397, 0.0, 2.397, 2.399, -9.0, 9.0]))
    gates_by_layer = gates.deterministic_gates()
    below, just_open, half, just_below_one, above, far_below = gates_by_layer[LAYER_0].tolist()
    assert (below, far_below, above, gates_by_layer[LAYER_1].item()) == (0, 0, 1, 1)
    assert 0 < just_open < 1e-3 < 1 - 1e-3 < just_below_one < 1
    assert half == pytest.approx(0.5)


@pytest.mark.parametrize("log_alpha", [-1.0, 0.0, 1.5])
def test_sample_gradient_equals_gradient_of_expectation(log_alpha: float) -> None:
    torch.manual_seed(0)
    gates = LearnedGates({LAYER_0: 1}, initial_log_alpha=log_alpha)
    samples = gates.sample(DRAWS)[LAYER_0][:, 0]  # (DRAWS,)
    (samples.square().mean()).backward()

    def expected(log_alpha_value: float) -> float:
        integral = quad(
            lambda noise: hard_concrete_gate(noise, log_alpha_value) ** 2 * expit(noise) * expit(-noise),
            -30,
            30,
            limit=400,
        )
        return float(integral[0])

    expected_grad = (expected(log_alpha + 1e-3) - expected(log_alpha - 1e-3)) / 2e-3
    assert gates.log_alpha.grad is not None
    assert gates.log_alpha.grad.item() == pytest.approx(expected_grad, abs=0.004)  # 4 standard deviations


def test_sample_differs_per_text_and_has_layer_shapes() -> None:
    torch.manual_seed(0)
    gates = LearnedGates({LAYER_0: 2, LAYER_1: 30, LayerAddress("", 2): 0}, initial_log_alpha=0.0)
    samples = gates.sample(4)
    assert [tuple(gate.shape) for gate in samples.values()] == [(4, 2), (4, 30), (4, 0)]
    assert len({tuple(row) for row in samples[LAYER_1].tolist()}) == 4


def test_set_open_share_shifts_all_log_alphas_equally() -> None:
    gates = LearnedGates({LAYER_0: 5})
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-5.0, -1.0, 0.0, 2.0, 7.0]))
    for fraction in (0.9, 0.31, 0.6):
        gates.set_open_fraction(fraction)
        assert gates.open_fraction().item() == pytest.approx(fraction, abs=1e-5)
        np.testing.assert_allclose(gates.log_alpha.detach().diff(), [4, 1, 2, 5], atol=1e-4)


# Selected heads.


def top_heads(scores: dict[Address, float], fraction: float) -> set[str]:
    ranked = sorted(scores, key=lambda head: -scores[head])
    return {str(head) for head in ranked[: round(fraction * len(ranked))]}


def repeating_texts(count: int, seed: int = 0) -> list[str]:
    """Return texts in which three words repeat: each word equals the word three positions before."""
    rng = np.random.default_rng(seed)
    return [" ".join(list(rng.choice(WORDS, 3, replace=False)) * 8) for _ in range(count)]


def test_learn_gates_constructed_useful_heads_stay_open() -> None:
    model = blank_model(heads=6, layers=1)
    (layer,) = model.attention_layers()
    for index in (1, 4):
        # The word two positions back is the next word; both heads predict it weakly.
        HeadBuilder(layer, index).attend_offsets(2).write(OUT, 0.3)
    HeadBuilder(layer, 2).attend_offsets(0).write(SCRATCH, 0.0)  # attends, but its output is zero
    scores = learn_gates(model, repeating_texts(40), keep=1 / 3, steps=40, rate=0.2)
    assert top_heads(scores, 1 / 3) == {"0.1", "0.4"}
    assert sum(scores.values()) / 6 == pytest.approx(1 / 3, abs=1e-3)
    for head, score in scores.items():
        assert score > 0.9 if str(head) in ("0.1", "0.4") else score < 0.1


GROUPED = ModelSpec(vocab=1, context=24, layers=1, attention=AttentionSpec(width=32, heads=4, kv_heads=2))
MASKED = replace(GROUPED, kind="encoder", output="mlm", attention=AttentionSpec(width=32, heads=4))
USELESS = "0.0,0.2"


@pytest.mark.parametrize("spec", [GROUPED, MASKED])
def test_learn_gates_trained_heads_stay_open_zero_heads_close(spec: ModelSpec) -> None:
    tokenizer = add_mask_token(word_tokenizer(WORDS))
    model = Transformer(replace(spec, vocab=len(tokenizer)))
    model.tokenizer = tokenizer
    with model.heads[USELESS].silenced():  # only the other heads learn
        recipe = Recipe(
            steps=300,
            batch_size=16,
            learning_rate=1e-2,
            warmup=20,
            rows="texts",
            mask_fraction=0.15,
            evaluate_every=300,
        )
        train(model, repeating_texts(800), recipe, progress=False)
    with torch.no_grad():
        for head in model.heads.select(USELESS):
            head.W_O.zero_()
    texts = repeating_texts(60, seed=1)
    head_importance = {head.head: head.importance for head in importance(model, texts, ablation="zero")}
    assert (
        min(head_importance["0.1"], head_importance["0.3"]) > 0.1 > 1e-6 > abs(head_importance["0.0"])
    )  # as constructed
    scores = learn_gates(model, texts, keep=0.5, steps=60, rate=0.2)
    assert top_heads(scores, 0.5) == {"0.1", "0.3"}
    assert sum(scores.values()) == pytest.approx(2, abs=1e-3)


def test_learn_gates_model_without_output_keeps_active_heads() -> None:
    model, useless = character_model(HEADLESS), "0.1,0.2,1.0,1.3"
    with torch.no_grad():
        for head in model.heads.select(useless):
            head.W_O.zero_()
    scores = learn_gates(model, TEXTS, keep=0.5, steps=80, rate=0.2)
    assert top_heads(scores, 0.5) == {"0.0", "0.3", "1.1", "1.2"}
    assert sum(scores.values()) == pytest.approx(4, abs=1e-3)


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_learn_gates_keep_zero_or_one(keep: float) -> None:
    scores = learn_gates(character_model(MODELS["decoder"]), TEXTS, keep=keep, steps=12, batch=4)
    assert list(scores.values()) == pytest.approx([keep] * 8, abs=1e-3)


# The model state is restored.


def snapshot_state(model: Transformer) -> list[Any]:
    """Return everything that must not change: weights, flags, gradients, modes, and the global RNG state."""
    values = [(value.detach().clone(), value.requires_grad, value.grad) for value in model.parameters()]
    grads = [None if grad is None else grad.clone() for _, _, grad in values]
    return [values, grads, [module.training for module in model.modules()], torch.random.get_rng_state()]


def assert_same_state(before: list[Any], after: list[Any]) -> None:
    for (bits, flag, grad), kept_grad, (after_bits, after_flag, after_grad) in zip(
        before[0], before[1], after[0], strict=True
    ):
        assert torch.equal(bits, after_bits)
        assert flag == after_flag
        assert grad is after_grad
        assert grad is None or torch.equal(kept_grad, after_grad)
    assert before[2] == after[2]
    assert torch.equal(before[3], after[3])


def make_partly_trained_model(spec: Any) -> Transformer:
    """Return a model in the middle of training: with gradients, one frozen weight and one submodule in eval mode."""
    model = character_model(spec, dropout=0.2).train()
    first, *_, last = model.parameters()
    first.requires_grad_(False)
    last.grad = torch.ones_like(last)
    model.blocks[0].eval()
    return model


@pytest.mark.parametrize("spec", [MODELS["decoder, rotary"], MODELS["decoder, cut"], MODELS["encoder"], HEADLESS])
def test_learn_gates_model_is_unchanged_bitwise(spec: Any) -> None:
    model = make_partly_trained_model(spec)
    before = snapshot_state(model)
    scores = learn_gates(model, TEXTS, **QUICK)
    assert_same_state(before, snapshot_state(model))
    assert list(scores) == list(model.spec.head_addresses)
    assert sum(scores.values()) / len(scores) == pytest.approx(0.5, abs=1e-3)


def test_learn_gates_interrupted_model_is_unchanged() -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        assert (stage, total) == ("gates", 12)
        if done == 3:
            raise KeyboardInterrupt

    model = make_partly_trained_model(MODELS["decoder"])
    before = snapshot_state(model)
    with pytest.raises(KeyboardInterrupt):
        learn_gates(model, TEXTS, **QUICK, progress=interrupt)
    assert_same_state(before, snapshot_state(model))


def test_learn_gates_same_seed_gives_same_scores() -> None:
    model = character_model(MODELS["decoder"])
    first, again, other = (learn_gates(model, TEXTS, **QUICK, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("spec", [MODELS["decoder"], HEADLESS])
def test_learn_gates_weights_option_trains_unfrozen_only(spec: Any) -> None:
    model = make_partly_trained_model(spec)
    before = snapshot_state(model)
    expected = learn_gates(make_partly_trained_model(spec), TEXTS, **QUICK, train_weights=True)
    assert learn_gates(model, TEXTS, **QUICK, train_weights=True) == expected
    after = snapshot_state(model)
    changed = [not torch.equal(old[0], new[0]) for old, new in zip(before[0], after[0], strict=True)]
    assert not changed[0]  # the frozen weight
    assert sum(changed) > len(changed) / 2
    assert [value[1:] for value in before[0]] == [value[1:] for value in after[0]]  # flags and gradients are unchanged
    assert before[2] == after[2]


# Errors.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep": 1.5}, "from 0 to 1"),
        ({"steps": 0}, "at least 1"),
        ({"batch": 0}, "at least 1"),
        ({"rate": 0.0}, "above 0"),
        ({"context": 65}, "larger than the context of the model"),
    ],
)
def test_learn_gates_invalid_numbers_raise(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        learn_gates(character_model(MODELS["decoder"]), TEXTS, **(QUICK | wrong))


def make_nan_model() -> Transformer:
    model = character_model(MODELS["decoder"])
    with torch.no_grad():
        for head in model.heads.select("0.1"):
            head.W_O.fill_(math.nan)
    return model


@pytest.mark.parametrize(
    ("make", "corpus", "message"),
    [
        (lambda: character_model(MODELS["decoder"]), "", "empty"),
        (lambda: character_model(MODELS["decoder"]), [], "empty"),
        (lambda: character_model(MODELS["decoder"]), ["a", "t"], "long enough"),
        (lambda: character_model(MODELS["encoder-decoder"]), TEXTS, "needs pairs"),
        (lambda: character_model(MODELS["decoder"].without("*")), TEXTS, "no heads"),
        (lambda: Transformer(MODELS["decoder"]), TEXTS, "no tokenizer"),
        (make_nan_model, TEXTS, "finite"),
    ],
)
def test_learn_gates_invalid_model_or_corpus_raises(make: Callable[[], Transformer], corpus: Any, message: str) -> None:
    with pytest.raises(HeadwiseError, match=message):
        learn_gates(make(), corpus, **QUICK)
