"""Variability: closed forms of hand-built heads, dense maps for others."""

from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.variability import variability
from headwise.analysis.roles.profile import profile
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, Rotary
from tests.analysis.constructed_heads import DIGITS, FILLERS, HeadBuilder, blank_model, decoder, digit_scores, documents
from tests.analysis.test_profile_invariance import SYNTHETIC, synthetic_model

TEXTS = [document.text for document in documents(12)]


def digit_finder_model() -> Transformer:
    """One layer: a head that attends to a digit, otherwise to the first token; a previous-token head; a head with uniform
    attention."""
    model = blank_model(heads=3, layers=1)
    (layer,) = model.attention_layers()
    HeadBuilder(layer, 0).attend_tokens(digit_scores()).attend_first().write()
    HeadBuilder(layer, 1).attend_offsets(1).write()
    return model


def texts_with_digit_at(*positions: int, n: int) -> list[str]:
    """For each position, make a text of fillers with a single digit at that position."""
    return [" ".join(DIGITS[0] if i == position else FILLERS[i % 30] for i in range(n)) for position in positions]


@pytest.mark.parametrize("N", [2, 5, 9])
def test_variability_digit_finder_matches_closed_form(N: int) -> None:
    """In row i, the texts with a visible digit attend to different positions, the others to the first token: 1 − Σ(c/N)²."""
    n, positions = 24, range(3, 3 + N)
    values = variability(digit_finder_model(), texts_with_digit_at(*positions, n=n), length=n, texts=N)
    # number of N texts whose digit is visible
    visible_digits = np.array([sum(position <= i for position in positions) for i in range(n)])
    rows = 1 - (visible_digits + (N - visible_digits) ** 2) / N**2
    assert rows[-1] == pytest.approx(1 - 1 / N)
    assert values["0.0"] == pytest.approx(rows.mean(), abs=1e-5)
    assert values["0.1"] == pytest.approx(0, abs=1e-5), "a token back, whatever the text"
    assert values["0.2"] == pytest.approx(0, abs=1e-6), "everywhere alike"


def test_variability_repeated_text_is_zero() -> None:
    values = variability(decoder(), [TEXTS[0]] * 4, length=20)
    assert list(values) == [f"{layer}.{head}" for layer in range(2) for head in range(6)]
    assert max(values.values()) == pytest.approx(0, abs=1e-6)


MODELS: dict[str, Any] = {
    "grouped": {},
    "encoder": {"kind": "encoder", "attention": AttentionSpec(width=24, heads=4, rotary=Rotary()), "output": "none"},
}


@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("size", [1, 64])
def test_variability_equals_dense_maps(variant: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, or all rows at once."""
    monkeypatch.setattr(row_blocks, "BLOCK_ROWS", size)
    model = synthetic_model(**MODELS[variant])
    texts = [document.text for document in SYNTHETIC]
    values = variability(model, texts, "1.*", length=20, texts=6)
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(text)[:20] for text in texts[:6]])
    with hw.record(model, "1.*", tensors="map") as recording:
        model(ids)
    assert list(values) == ["1.0", "1.1", "1.2", "1.3"]
    for address, value in values.items():
        p = recording[address].map().double()  # (6, 20, 20)
        assert value == pytest.approx(float((p - p.mean(0)).abs().sum() / (2 * p.sum())), abs=1e-5)
        assert 0 < value < 1


def test_variability_off_by_one_softmax_equals_dense_maps() -> None:
    """Rows that do not sum to 1 are compared with their actual sum."""
    model = synthetic_model(attention=AttentionSpec(width=24, heads=4, softmax="off_by_one"))
    values = variability(model, [document.text for document in SYNTHETIC], "0.2", length=18)
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(document.text)[:18] for document in SYNTHETIC])
    with hw.record(model, "0.2", tensors="map") as recording:
        model(ids)
    p = recording["0.2"].map().double()
    assert float(p.sum()) < len(SYNTHETIC) * 18 - 1
    assert values["0.2"] == pytest.approx(float((p - p.mean(0)).abs().sum() / (2 * p.sum())), abs=1e-5)


def test_profile_variability_equals_function() -> None:
    profiled = profile(decoder(), TEXTS, relations=False, causal=False)
    alone = variability(decoder(), TEXTS)
    assert profiled.metric("variability") == pytest.approx(list(alone.values()), abs=1e-6)
    assert profiled["0.0"].metrics["variability"] == pytest.approx(0, abs=1e-5)
    p = np.zeros((len(TEXTS), 16, 16))  # equal weight on all visible digits, otherwise on the first token
    for text, words in enumerate(text.split()[:16] for text in TEXTS):
        for i in range(16):
            digit_positions = [j for j in range(i + 1) if words[j] in DIGITS] or [0]
            p[text, i, digit_positions] = 1 / len(digit_positions)
    assert profiled["1.3"].metrics["variability"] == pytest.approx(
        np.abs(p - p.mean(0)).sum() / (2 * p.sum()), abs=1e-3
    )
    for texts in (TEXTS[:1], ["1 2 3", "2 3 4"]):
        short = profile(decoder(), texts, relations=False, causal=False)
        assert np.isnan(short.metric("variability")).all()


def test_variability_invalid_arguments_raise() -> None:
    model = decoder()
    with pytest.raises(HeadwiseError, match="1 texts have at least 16 tokens"):
        variability(model, TEXTS[:1])
    with pytest.raises(HeadwiseError, match="0 texts have at least 70 tokens"):
        variability(model, TEXTS, length=70)
    with pytest.raises(HeadwiseError, match="texts=1"):
        variability(model, TEXTS, texts=1)
    with pytest.raises(HeadwiseError, match=r"7\.1"):
        variability(model, TEXTS, "7.1")
