"""Models that are too small for some questions: those are not asked, and nothing is told of texts nobody gave."""

import numpy as np
import pytest
import torch

from headwise.analysis.recording.tokenized_corpus import DOCUMENTS
from headwise.analysis.roles.history import HeadHistory
from headwise.analysis.roles.profile import profile
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import byte_tokenizer, word_tokenizer
from headwise.text.documents import Document, Relation
from headwise.text.synthetic import VOCABULARY
from headwise.text.tokenizer import Tokenizer


def small(tokenizer: Tokenizer, context: int, learned: bool = True) -> Transformer:
    torch.manual_seed(0)
    attention = AttentionSpec(width=12, heads=2, rotary=None if learned else Rotary())
    spec = ModelSpec(len(tokenizer), context, 1, attention, hidden=5, positions="learned" if learned else "none")  # pyright: ignore[reportCallIssue]
    model = Transformer(spec)
    model.tokenizer = tokenizer
    return model.eval()


@pytest.mark.usefixtures("few_documents")
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("given", [None, ["to be or not to be"] * 3])
def test_a_context_of_twelve_bytes(given: list[str] | None, learned: bool) -> None:
    """No document of the probe set fits, so none has relations; its texts are read in pieces."""
    made = profile(small(byte_tokenizer(), 12, learned), given)
    assert made.relations is None
    assert np.isfinite(made.measure("entropy")).all()
    assert np.isfinite(made.measure("induction")).all()
    assert np.isnan(made.measure("long range")).all()


def test_a_vocabulary_of_five() -> None:
    model = small(word_tokenizer(["a", "b", "c"]), 12)
    made = profile(model, ["a b c a", "c b a b a", "b b"])
    assert np.isfinite(made.measure("entropy")).all()
    for name in ("induction", "duplicate", "induction null"):
        assert np.isnan(made.measure(name)).all(), "three plain tokens cannot be said twice and be held against others"
    assert np.array_equal(made.merge(made).measure("entropy"), made.measure("entropy"))
    history = HeadHistory(["a b c a"])
    history(model, 0)
    assert np.isnan(history.of("0.0", "induction")).all()


def test_some_documents_fit() -> None:
    """Of the little language's documents those that fit are read, with their relations."""
    made = profile(small(word_tokenizer(VOCABULARY), 40), causal=False)
    assert made.relations is not None
    assert 0 < made.about["documents"] < DOCUMENTS == 500


@pytest.mark.parametrize("off", [False, []])
def test_relations_can_be_switched_off(off: object) -> None:
    model = small(word_tokenizer(["a", "b", "c"]), 12)
    documents = [Document.of(["a", "b", "c", "a", "b"], [Relation("det", 4, 2)])] * 3
    assert profile(model, documents).relations is not None
    made = profile(model, documents, relations=off)
    assert made.relations is None
    assert made.about["documents"] == 0
