"""A real language model, loaded natively and attached through transformers: equal roles and equal logit attributions."""

import numpy as np
import pytest

import headwise as hw
from headwise.analysis.attribution.head_output_scores import logit_attribution, token_effects
from headwise.text.annotated_document import Document
from tests.parity.real import smollm2_folder, smollm2_oracle


def load_native_and_attached():
    native = hw.load(smollm2_folder())
    model = smollm2_oracle()
    model.set_attn_implementation("sdpa")
    attached = hw.attach(model, native.tokenizer)
    return native, attached


@pytest.mark.slow
def test_profile_smollm2_attached_has_same_roles() -> None:
    native, attached = load_native_and_attached()
    documents = [item for item in hw.Corpus.probe_set().items() if isinstance(item, Document)][:48]
    a, b = (hw.profile(model, documents, causal=False) for model in (native, attached))
    assert a.heads_by_role() == b.heads_by_role()
    assert a.heads_by_role()  # some roles are found
    for native_head, attached_head in zip(a, b, strict=True):
        for metric, value in native_head.metrics.items():
            np.testing.assert_allclose(attached_head.metrics[metric], value, atol=1e-4, rtol=0, err_msg=metric)


@pytest.mark.slow
def test_logit_attribution_smollm2_attached_equals_native() -> None:
    native, attached = load_native_and_attached()
    a, b = (logit_attribution(model, "The capital of France is", " Paris", " London") for model in (native, attached))
    assert b.is_complete
    largest = max(map(abs, a.parts.values()))
    np.testing.assert_allclose(list(b.parts.values()), list(a.parts.values()), rtol=0, atol=1e-5 * largest)
    for head in ("0.1", "15.4"):
        native_effects, attached_effects = (
            token_effects(model, head, " Paris", k=5)[0] for model in (native, attached)
        )
        assert [word for word, _ in native_effects.promotes] == [word for word, _ in attached_effects.promotes]
