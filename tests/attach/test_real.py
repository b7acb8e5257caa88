"""A real language model, loaded natively and attached to through transformers: the same table of roles."""

import numpy as np
import pytest

import headwise as hw
from headwise.text.documents import Document
from tests.parity.real import smollm2_folder, smollm2_oracle


@pytest.mark.slow
def test_smollm2_has_the_same_roles_both_ways() -> None:
    ours = hw.load(smollm2_folder())
    model = smollm2_oracle()
    model.set_attn_implementation("sdpa")
    theirs = hw.attach(model, ours.tokenizer)
    documents = [item for item in hw.Corpus.probe().items() if isinstance(item, Document)][:48]
    a, b = (hw.profile(model, documents, causal=False) for model in (ours, theirs))
    assert a.roles() == b.roles()
    assert a.roles()  # there are some
    for one, other in zip(a, b, strict=True):
        for measure, value in one.measures.items():
            np.testing.assert_allclose(other.measures[measure], value, atol=1e-4, rtol=0, err_msg=measure)
