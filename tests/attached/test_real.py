"""A real language model, loaded natively and attached to through transformers: the same roles, the same shares of a logit."""

import numpy as np
import pytest

import headwise as hw
from headwise.analysis.attribution.ov_analysis import logit_attribution, vocabulary
from headwise.text.documents import Document
from tests.parity.real import smollm2_folder, smollm2_oracle


def both_ways():
    ours = hw.load(smollm2_folder())
    model = smollm2_oracle()
    model.set_attn_implementation("sdpa")
    theirs = hw.attach(model, ours.tokenizer)
    return ours, theirs


@pytest.mark.slow
def test_smollm2_has_the_same_roles_both_ways() -> None:
    ours, theirs = both_ways()
    documents = [item for item in hw.Corpus.probe().items() if isinstance(item, Document)][:48]
    a, b = (hw.profile(model, documents, causal=False) for model in (ours, theirs))
    assert a.roles() == b.roles()
    assert a.roles()  # there are some
    for one, other in zip(a, b, strict=True):
        for measure, value in one.measures.items():
            np.testing.assert_allclose(other.measures[measure], value, atol=1e-4, rtol=0, err_msg=measure)


@pytest.mark.slow
def test_smollm2_shares_out_a_logit_and_promotes_words_the_same_both_ways() -> None:
    ours, theirs = both_ways()
    a, b = (logit_attribution(one, "The capital of France is", " Paris", " London") for one in (ours, theirs))
    assert b.complete
    largest = max(map(abs, a.parts.values()))
    np.testing.assert_allclose(list(b.parts.values()), list(a.parts.values()), rtol=0, atol=1e-5 * largest)
    for head in ("0.1", "15.4"):
        mine, other = (vocabulary(one, head, " Paris", k=5)[0] for one in (ours, theirs))
        assert [word for word, _ in mine.promotes] == [word for word, _ in other.promotes]
