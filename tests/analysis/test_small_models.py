"""Models that are too small for some metrics: these are skipped, and nothing is reported for them."""

import numpy as np
import pytest
import torch

from headwise.analysis.recording.tokenized_corpus import DEFAULT_DOCUMENTS
from headwise.analysis.roles.head_history import HeadHistory
from headwise.analysis.roles.profile import profile
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec, Rotary
from headwise.text.annotated_document import Document, Relation
from headwise.text.build_tokenizers import byte_tokenizer, word_tokenizer
from headwise.text.synthetic import VOCABULARY
from headwise.text.tokenizer import Tokenizer


def small_model(tokenizer: Tokenizer, context: int, learned: bool = True) -> Transformer:
    torch.manual_seed(0)
    attention = AttentionSpec(width=12, heads=2, rotary=None if learned else Rotary())
    spec = ModelSpec(len(tokenizer), context, 1, attention, mlp_width=5, positions="learned" if learned else "none")  # pyright: ignore[reportCallIssue]
    model = Transformer(spec)
    model.tokenizer = tokenizer
    return model.eval()


@pytest.mark.usefixtures("few_documents")
@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("corpus", [None, ["to be or not to be"] * 3])
def test_profile_tiny_context_measures_what_fits(corpus: list[str] | None, learned: bool) -> None:
    """No document of the probe set fits, so relations are not measured. The texts are read in chunks."""
    profiled = profile(small_model(byte_tokenizer(), 12, learned), corpus)
    assert profiled.relation_metric is None
    assert np.isfinite(profiled.metric("entropy")).all()
    assert np.isfinite(profiled.metric("induction")).all()
    assert np.isnan(profiled.metric("long range")).all()


def test_profile_tiny_vocabulary_skips_induction() -> None:
    model = small_model(word_tokenizer(["a", "b", "c"]), 12)
    profiled = profile(model, ["a b c a", "c b a b a", "b b"])
    assert np.isfinite(profiled.metric("entropy")).all()
    for name in ("induction", "duplicate", "induction baseline"):
        assert np.isnan(profiled.metric(name)).all(), (
            "three plain tokens cannot be said twice and be held against others"
        )
    assert np.array_equal(profiled.merge(profiled).metric("entropy"), profiled.metric("entropy"))
    history = HeadHistory(["a b c a"])
    history(model, 0)
    assert np.isnan(history.curve("0.0", "induction")).all()


def test_profile_default_corpus_keeps_documents_that_fit() -> None:
    """The documents of the synthetic language that fit are read, with their relations."""
    profiled = profile(small_model(word_tokenizer(VOCABULARY), 40), causal=False)
    assert profiled.relation_metric is not None
    assert 0 < profiled.metadata["documents"] < DEFAULT_DOCUMENTS == 500


@pytest.mark.parametrize("off", [False, []])
def test_profile_relations_off_has_no_relations(off: object) -> None:
    model = small_model(word_tokenizer(["a", "b", "c"]), 12)
    documents = [Document.of(["a", "b", "c", "a", "b"], [Relation("det", 4, 2)])] * 3
    assert profile(model, documents).relation_metric is not None
    profiled = profile(model, documents, relations=off)
    assert profiled.relation_metric is None
    assert profiled.metadata["documents"] == 0
