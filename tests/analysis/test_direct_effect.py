"""Direct effect on the logit of the attended token: closed forms of built heads, direct logit attribution, random heads."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.attribution.copy_logit_effect import direct_effects
from headwise.analysis.attribution.head_output_scores import logit_attribution, ov_eigenvalue_scores
from headwise.analysis.recording.recording import record
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import byte_tokenizer, word_tokenizer
from tests.analysis.constructed_word_models import WordModel, scores_to_offset, scores_to_position
from tests.attached.test_analysis import build
from tests.contract.layers import MODELS, make_model, randomize

WORDS = [f"w{i}" for i in range(20)]


def sentences(count: int, words: list[str], length: int = 9, seed: int = 0) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(words, length)) for _ in range(count)]


@pytest.mark.parametrize("gain", [0.3, -0.3, 2.0])
def test_direct_effect_built_copy_head_equals_closed_form(gain: float) -> None:
    """Token and position are unit vectors, so the norm multiplies by √(D/2) and the value is √(D/2) e_a. The head adds g =
    gain √(D/2) along the unembedding of a, and the final norm divides by √((2 + g²)/D)."""
    built = WordModel(WORDS, heads=2)
    built.set_head("0.0", position_scores=scores_to_offset(1), output_map=gain * torch.eye(built.V))
    built.set_head("0.1", position_scores=scores_to_position(0))
    effects = direct_effects(built.model, sentences(12, WORDS))
    width = built.model.spec.width
    written = gain * math.sqrt(width / 2)
    expected = written * math.sqrt(width / (2 + written**2)) * (1 - 1 / built.V)
    assert list(effects) == ["0.0"], "a head that only attends to the first token has no effect to report"
    effect = effects["0.0"]
    assert effect.mean == pytest.approx(expected, rel=1e-5)
    assert (effect.low, effect.high) == (pytest.approx(expected, rel=1e-5),) * 2
    assert effect.sign == (1 if gain > 0 else -1)
    assert effect.queries == 12 * 7, "of 9 positions the first two attend to the first token"
    assert effect.share == pytest.approx(7 / 9)
    assert effect.texts == 12
    assert math.isnan(ov_eigenvalue_scores(built.model)["0.0"]), "the eigenvalues of W_V W_O are 0, whatever is written"


def test_direct_effect_constant_shift_of_all_logits_is_zero() -> None:
    built = WordModel(WORDS, heads=1)
    built.set_head("0.0", position_scores=scores_to_offset(1), output_map=torch.ones(built.V, built.V))
    assert direct_effects(built.model, sentences(8, WORDS))["0.0"].mean == pytest.approx(0, abs=1e-5)


def attributed(model: ModelProtocol, texts: list[str]) -> dict[str, list[float]]:
    """Compute by hand, text by text: the largest weight of each row, and the contribution of the head to the logits."""
    tokenizer = model.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    special = {i for i in tokenizer.special.values() if i is not None}
    effects: dict[str, list[float]] = {str(address): [] for address in model.spec.head_addresses}
    for text in texts:
        ids = tokenizer.encode(text)
        with torch.no_grad(), record(model, "*") as recording:
            model(torch.tensor([ids]))
        for row in range(len(ids)):
            shares = [logit_attribution(model, ids, token, position=row).heads for token in range(model.spec.vocab)]
            for address, values in effects.items():
                key = int(recording[address].map()[0, row].argmax())
                if key and ids[key] not in special:
                    values.append(shares[ids[key]][address] - float(np.mean([share[address] for share in shares])))
    return effects


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("name", ["decoder", "decoder, rotary", "decoder, cut"])
def test_direct_effect_equals_logit_attribution(name: str, norm: str) -> None:
    model = make_model(replace(MODELS[name], norm=norm))
    randomize(model)
    words = [f"w{i}" for i in range(model.spec.vocab - 2)]
    model.tokenizer = word_tokenizer(words)
    texts = sentences(5, words, 4)
    effects, expected = direct_effects(model, texts), attributed(model, texts)
    assert effects
    for address, effect in effects.items():
        assert effect.mean == pytest.approx(np.mean(expected[address]), rel=1e-6, abs=1e-9)
        assert effect.queries == len(expected[address])


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_direct_effect_attached_model_equals_logit_attribution(name: str) -> None:
    """Gemma 3 has a norm between attention and the residual stream."""
    model = hw.attach(*build(name))
    texts = [chr(97 + i) + "b" for i in range(6)]
    effects, expected = direct_effects(model, texts), attributed(model, texts)
    assert effects
    for address, effect in effects.items():
        assert effect.mean == pytest.approx(np.mean(expected[address]), rel=1e-4, abs=1e-6)


def test_direct_effect_random_heads_intervals_cover_zero() -> None:
    """96 random heads on texts that share all their tokens. Resampling texts alone would exclude 0 for 81 of them."""
    torch.manual_seed(0)
    attention = AttentionSpec(width=32, heads=16, head_dim=8)
    spec = ModelSpec(vocab=257, context=64, layers=6, attention=attention, norm="rms", tied=False)
    model = Transformer(spec).eval()
    with torch.no_grad():
        for head in model.heads:
            head.W_Q.mul_(30)  # sharp, so that heads attend to single tokens
    model.tokenizer = byte_tokenizer()
    texts = [" ".join(text.split("w")) for text in sentences(60, WORDS, 12)]
    effects = direct_effects(model, texts)
    assert len(effects) == 96
    assert sum(effect.sign != 0 for effect in effects.values()) <= 10, "10 of 96: the 99th percentile at 5%"


def test_direct_effect_without_unembedding_raises() -> None:
    for name in ("encoder", "encoder-decoder"):
        with pytest.raises(HeadwiseError, match="decoder"):
            direct_effects(make_model(MODELS[name]), ["a"])
