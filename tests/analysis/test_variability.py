"""Variability: closed forms for heads built by hand, dense maps for others."""

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
from tests.analysis.constructed_heads import DIGITS, FILLERS, Built, blank, decoder, digits, documents
from tests.analysis.test_profile_invariance import LITTLE, little

TEXTS = [document.text for document in documents(12)]


def finder() -> Transformer:
    """One layer: a head that looks for a digit, else at the first token; one a token back; one everywhere alike."""
    model = blank(heads=3, layers=1)
    (layer,) = model.attention_layers()
    Built(layer, 0).tokens(digits()).rest().writes()
    Built(layer, 1).places(1).writes()
    return model


def with_digit_at(*places: int, n: int) -> list[str]:
    """For each place a text of fillers with a digit there alone."""
    return [" ".join(DIGITS[0] if i == place else FILLERS[i % 30] for i in range(n)) for place in places]


@pytest.mark.parametrize("N", [2, 5, 9])
def test_texts_that_each_send_a_head_elsewhere(N: int) -> None:
    """Row i sends the texts whose digit it sees to N places, the others to the first token: 1 − Σ(c/N)² over places."""
    n, places = 24, range(3, 3 + N)
    made = variability(finder(), with_digit_at(*places, n=n), length=n, texts=N)
    seen = np.array([sum(place <= i for place in places) for i in range(n)])  # of N, each at a place of its own
    rows = 1 - (seen + (N - seen) ** 2) / N**2
    assert rows[-1] == pytest.approx(1 - 1 / N)
    assert made["0.0"] == pytest.approx(rows.mean(), abs=1e-5)
    assert made["0.1"] == pytest.approx(0, abs=1e-5), "a token back, whatever the text"
    assert made["0.2"] == pytest.approx(0, abs=1e-6), "everywhere alike"


def test_the_same_text_again_and_again() -> None:
    made = variability(decoder(), [TEXTS[0]] * 4, length=20)
    assert list(made) == [f"{layer}.{head}" for layer in range(2) for head in range(6)]
    assert max(made.values()) == pytest.approx(0, abs=1e-6)


MODELS: dict[str, Any] = {
    "grouped": {},
    "encoder": {"kind": "encoder", "attention": AttentionSpec(width=24, heads=4, rotary=Rotary()), "output": "none"},
}


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("size", [1, 64])
def test_dense_maps_say_the_same(which: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, or all at once."""
    monkeypatch.setattr(row_blocks, "ROWS", size)
    model = little(**MODELS[which])
    texts = [document.text for document in LITTLE]
    made = variability(model, texts, "1.*", length=20, texts=6)
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(text)[:20] for text in texts[:6]])
    with hw.record(model, "1.*", what="map") as recording:
        model(ids)
    assert list(made) == ["1.0", "1.1", "1.2", "1.3"]
    for address, value in made.items():
        p = recording[address].map().double()  # (6, 20, 20)
        assert value == pytest.approx(float((p - p.mean(0)).abs().sum() / (2 * p.sum())), abs=1e-5)
        assert 0 < value < 1


def test_a_sink_takes_its_share_from_both() -> None:
    """Rows that do not sum to 1 are held against what they do sum to."""
    model = little(attention=AttentionSpec(width=24, heads=4, softmax="off_by_one"))
    made = variability(model, [document.text for document in LITTLE], "0.2", length=18)
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(document.text)[:18] for document in LITTLE])
    with hw.record(model, "0.2", what="map") as recording:
        model(ids)
    p = recording["0.2"].map().double()
    assert float(p.sum()) < len(LITTLE) * 18 - 1
    assert made["0.2"] == pytest.approx(float((p - p.mean(0)).abs().sum() / (2 * p.sum())), abs=1e-5)


def test_a_profile_has_it_too() -> None:
    made = profile(decoder(), TEXTS, relations=False, causal=False)
    alone = variability(decoder(), TEXTS)
    assert made.measure("variability") == pytest.approx(list(alone.values()), abs=1e-6)
    assert made["0.0"].measures["variability"] == pytest.approx(0, abs=1e-5)
    p = np.zeros((len(TEXTS), 16, 16))  # alike at all digits that are seen, else at the first token
    for text, words in enumerate(text.split()[:16] for text in TEXTS):
        for i in range(16):
            found = [j for j in range(i + 1) if words[j] in DIGITS] or [0]
            p[text, i, found] = 1 / len(found)
    assert made["1.3"].measures["variability"] == pytest.approx(np.abs(p - p.mean(0)).sum() / (2 * p.sum()), abs=1e-3)
    for texts in (TEXTS[:1], ["1 2 3", "2 3 4"]):
        short = profile(decoder(), texts, relations=False, causal=False)
        assert np.isnan(short.measure("variability")).all()


def test_what_is_refused() -> None:
    model = decoder()
    with pytest.raises(HeadwiseError, match="1 texts have 16 tokens, and two are needed"):
        variability(model, TEXTS[:1])
    with pytest.raises(HeadwiseError, match="0 texts have 70 tokens"):
        variability(model, TEXTS, length=70)
    with pytest.raises(HeadwiseError, match="got 1 of 16"):
        variability(model, TEXTS, texts=1)
    with pytest.raises(HeadwiseError, match=r"7\.1"):
        variability(model, TEXTS, "7.1")
