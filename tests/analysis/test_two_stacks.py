"""A profile of an encoder-decoder, which reads each text as source and as target."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.token_classes import token_class_flags
from headwise.analysis.metrics.variability import variability
from headwise.analysis.recording.batching import make_batches, tokenizer_of
from headwise.analysis.recording.recording import record
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.heads import Head
from headwise.model import Transformer
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus
from tests.analysis.dense_reference import assert_matches_dense, streaming_and_dense
from tests.analysis.test_profile_invariance import GROUPED, synthetic_model

DOCUMENTS = [item for item in Corpus.synthetic("held-out", documents=16, seed=3).items() if isinstance(item, Document)]
CORPUS_PARTS = Corpus.of(DOCUMENTS[:10]), Corpus.of(DOCUMENTS[10:])


def build_model(**fields: Any) -> Transformer:
    options = {"positions": "sinusoidal", "encoder_layers": 1, "context": 200} | fields
    return synthetic_model("encoder-decoder", replace(GROUPED, rotary=None), **options)


def heads_of_stack(model: Transformer) -> dict[str, np.ndarray]:
    """Return the heads of each stack."""
    names = np.array([address.stack for address in model.spec.head_addresses])
    return {stack: names == stack for stack in ("enc", "dec", "cross")}


@pytest.fixture(scope="module")
def profiled_model() -> tuple[Transformer, Profile]:
    model = build_model()
    return model, profile(model, Corpus.of(DOCUMENTS))


@pytest.mark.parametrize("side", ["right", "left"])
def test_default_metrics_encoder_decoder_equal_dense_maps(side: str) -> None:
    model = build_model()
    flags = token_class_flags(tokenizer_of(model), model.spec.vocab)
    samples = list(TokenizedCorpus.of(model, CORPUS_PARTS[0]))
    accumulator, dense = streaming_and_dense(model, list(make_batches(samples, 400, side)), flags)
    across = heads_of_stack(model)["cross"]
    positional = {
        metric_spec.name
        for metric in default_metrics(flags)
        for metric_spec in metric.metric_specs
        if metric_spec.positional
    }
    for name in positional & dense.keys():  # distances between two texts are not defined
        sums, counts = dense[name]
        dense[name] = (np.where(across, 0, sums), np.where(across, 0, counts))
    assert_matches_dense(accumulator, dense)
    assert np.isfinite(accumulator.mean("entropy")).all()
    for name in positional & accumulator.fields.keys():
        assert np.isnan(accumulator.mean(name)[across]).all()


def test_profile_encoder_decoder_metrics_per_stack(profiled_model: tuple[Transformer, Profile]) -> None:
    model, profiled = profiled_model
    stack_masks = heads_of_stack(model)
    assert profiled.addresses == model.spec.head_addresses
    for name in ("entropy", "participation", "confidence", "first", "special", "output share", "variability"):
        assert np.isfinite(profiled.metric(name)).all(), name
    relation_metrics = [name for name in profiled.accumulator.fields if name.endswith(" hits")]
    for name in ("distance", "offset 1", "induction", "duplicate", *relation_metrics):
        values = profiled.metric(name)
        assert np.isnan(values[stack_masks["cross"]]).all(), name
        assert len(set(np.isfinite(values[~stack_masks["cross"]]))) == 1, (
            name
        )  # of both stacks, or of neither: not all arcs point back
    assert np.isfinite(profiled.metric("subject-verb > hits")[~stack_masks["cross"]]).all()
    ahead = profiled.metric("offset -1")
    assert np.isfinite(ahead[stack_masks["enc"]]).all()
    assert np.isnan(ahead[~stack_masks["enc"]]).all()
    assert len(relation_metrics) > 4
    assert {str(address) for address in profiled.addresses} == {str(head.address) for head in profiled}


def test_profile_encoder_decoder_relations_point_back(profiled_model: tuple[Transformer, Profile]) -> None:
    """Every arc counts once, from its later word: as > or as <, depending on its direction."""
    model, profiled = profiled_model
    tokenizer = tokenizer_of(model)
    assert profiled.relation_metric is not None
    want: dict[str, int] = {}
    for document in DOCUMENTS:
        # ids begin with a word, or with a special token
        first = tokenizer.align(document.text, document.words).words_of_token[0]
        for arc in document.relations:
            later, earlier = max(arc.source, arc.target), min(arc.source, arc.target)
            if later != earlier and earlier not in first:
                relation = f"{arc.name} {'>' if arc.source == later else '<'}"
                want[relation] = want.get(relation, 0) + 1
    counted = dict(zip(map(str, profiled.relation_metric.relations), profiled.relation_metric.arcs.sum(0), strict=True))
    for relation, arcs in want.items():
        assert counted[relation] == arcs, relation


def test_profile_encoder_decoder_merges_and_saves(profiled_model: tuple[Transformer, Profile], tmp_path: Path) -> None:
    model, profiled = profiled_model
    first, second = (
        profile(model, part, batch_tokens=tokens) for part, tokens in zip(CORPUS_PARTS, (64, 2048), strict=True)
    )
    back = Profile.load(profiled.save(tmp_path / "heads.npz"))
    for again in (first.merge(second), back):
        for name in profiled.accumulator.fields:
            if name != "variability" or again is back:  # the result of one of two samples is kept
                np.testing.assert_allclose(again.metric(name), profiled.metric(name), atol=1e-5, err_msg=name)
    assert [head.role for head in back] == [head.role for head in profiled]
    assert len(profiled.table()) == len(profiled.addresses)


@torch.no_grad()
def test_profile_cross_head_on_delimiters_gets_role() -> None:
    """All weights are 0 except the embedding, in which full stops have a channel, and one head that reads it."""
    model = build_model(positions="none")
    tokenizer = tokenizer_of(model)
    for name, parameter in model.named_parameters():
        parameter.fill_(float("norm" in name and name.endswith("weight")))
    stop_id, embedding = tokenizer.backend.token_to_id("."), model.embed.tokens.weight
    embedding[:, 1] = 1
    embedding[stop_id, 0] = 3
    head = model.heads["cross.1.2"]
    assert isinstance(head, Head)
    head.W_Q[1, 0] = head.W_K[0, 0] = 20
    head.W_V[:] = head.W_O.mT[:] = torch.randn(head.W_V.shape, generator=torch.Generator().manual_seed(0))
    profiled = profile(model, Corpus.of(DOCUMENTS))
    assert profiled.heads_by_role() == {"delimiter": [head.address]}
    head_profile = profiled["cross.1.2"]
    assert (head_profile.evidence_level, head_profile.idle_pattern) == ("value-weighted", ())
    assert head_profile.score == pytest.approx(1.0, abs=1e-3)
    assert all(context.attended == "." for context in head_profile.top_contexts)
    assert profiled["cross.1.3"].idle_pattern == ("broad", "idle")


def test_variability_encoder_decoder_equals_dense_maps() -> None:
    model = build_model()
    values = variability(model, Corpus.of(DOCUMENTS), "cross.1.2,enc.0.0", length=12)
    assert set(values) == {"cross.1.2", "enc.0.0"}
    texts = [ids for sample in TokenizedCorpus.of(model, Corpus.of(DOCUMENTS)) if len(ids := sample.ids[:12]) == 12][
        :16
    ]
    ids = torch.tensor(texts)
    with torch.no_grad(), record(model, ",".join(values), tensors="map") as recording:
        model(ids, source=ids)
    for name, value in values.items():
        p = recording[name].map().double()  # (B, T, S)
        assert value == pytest.approx(float((p - p.mean(0)).abs().sum() / (2 * p.sum())), abs=1e-5)
