"""A profile of an encoder-decoder, which reads each text as its source and as its target."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise.analysis.metrics.default_metrics import usual_measures
from headwise.analysis.metrics.token_classes import class_flags
from headwise.analysis.metrics.variability import variability
from headwise.analysis.recording.batching import make_batches, tokenizer_of
from headwise.analysis.recording.recording import record
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.heads import Head
from headwise.model import Transformer
from headwise.text.corpus import Corpus
from headwise.text.documents import Document
from tests.analysis.dense_reference import Rows, assert_alike, watch
from tests.analysis.test_profile_invariance import GROUPED, little

DOCUMENTS = [item for item in Corpus.little("held-out", documents=16, seed=3).items() if isinstance(item, Document)]
PARTS = Corpus.of(DOCUMENTS[:10]), Corpus.of(DOCUMENTS[10:])


def build(**fields: Any) -> Transformer:
    options = {"positions": "sinusoidal", "encoder_layers": 1, "context": 200} | fields
    return little("encoder-decoder", replace(GROUPED, rotary=None), **options)


def stacks(model: Transformer) -> dict[str, np.ndarray]:
    """Which heads belong to each stack."""
    names = np.array([address.stack for address in model.spec.addresses])
    return {stack: names == stack for stack in ("enc", "dec", "cross")}


@pytest.fixture(scope="module")
def made() -> tuple[Transformer, Profile]:
    model = build()
    return model, profile(model, Corpus.of(DOCUMENTS))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("detail", ["full", "light"])
def test_every_stack_is_measured_as_the_dense_way_does_it(side: str, detail: str) -> None:
    model = build()
    flags = class_flags(tokenizer_of(model), model.spec.vocab)
    units = list(Reading.of(model, PARTS[0]))
    tally, dense = watch(model, list(make_batches(units, 400, side)), flags, detail=detail)
    across = stacks(model)["cross"]
    placed = {number.name for measure in usual_measures(flags) for number in measure.numbers if number.placed}
    for name in placed & dense.keys():  # between two texts there are no distances
        sums, counts = dense[name]
        dense[name] = (np.where(across, 0, sums), np.where(across, 0, counts))
    whole = ("confidence", "argmax", "long range", *(name for name in placed if name.startswith("distance ")))
    assert_alike(tally, _only(dense, lambda name: detail == "full" or not name.startswith(whole)))
    assert np.isfinite(tally.mean("entropy")).all()
    for name in placed & tally.fields.keys():
        assert np.isnan(tally.mean(name)[across]).all()


def test_what_is_asked_of_which_stack(made: tuple[Transformer, Profile]) -> None:
    model, seen = made
    here = stacks(model)
    assert seen.addresses == model.spec.addresses
    for name in ("entropy", "participation", "confidence", "first", "special", "write share", "variability"):
        assert np.isfinite(seen.measure(name)).all(), name
    asked = [name for name in seen.tally.fields if name.endswith(" hits")]
    for name in ("distance", "offset 1", "induction", "duplicate", *asked):
        values = seen.measure(name)
        assert np.isnan(values[here["cross"]]).all(), name
        assert len(set(np.isfinite(values[~here["cross"]]))) == 1, name  # of both stacks, or of none: not all lead back
    assert np.isfinite(seen.measure("subject-verb > hits")[~here["cross"]]).all()
    ahead = seen.measure("offset -1")
    assert np.isfinite(ahead[here["enc"]]).all()
    assert np.isnan(ahead[~here["enc"]]).all()
    assert len(asked) > 4
    assert {str(address) for address in seen.addresses} == {str(head.address) for head in seen}


def test_relations_are_those_that_lead_back(made: tuple[Transformer, Profile]) -> None:
    """Every arc is asked once, from its later word: under > or under <, whichever way it was drawn."""
    model, seen = made
    tokenizer = tokenizer_of(model)
    assert seen.relations is not None
    want: dict[str, int] = {}
    for document in DOCUMENTS:
        first = tokenizer.align(document.text, document.words).words_of_token[0]  # ids begin with it, or with a token
        for arc in document.relations:
            later, earlier = max(arc.source, arc.target), min(arc.source, arc.target)
            if later != earlier and earlier not in first:
                question = f"{arc.name} {'>' if arc.source == later else '<'}"
                want[question] = want.get(question, 0) + 1
    counted = dict(zip(map(str, seen.relations.questions), seen.relations.arcs.sum(0), strict=True))
    for question, arcs in want.items():
        assert counted[question] == arcs, question


def test_merged_and_saved(made: tuple[Transformer, Profile], tmp_path: Path) -> None:
    model, seen = made
    one, other = (profile(model, part, tokens=tokens) for part, tokens in zip(PARTS, (64, 2048), strict=True))
    back = Profile.load(seen.save(tmp_path / "heads.npz"))
    for again in (one.merge(other), back):
        for name in seen.tally.fields:
            if name != "variability" or again is back:  # of two samples one is kept
                np.testing.assert_allclose(again.measure(name), seen.measure(name), atol=1e-5, err_msg=name)
    assert [head.role for head in back] == [head.role for head in seen]
    assert len(seen.table()) == len(seen.addresses)


@torch.no_grad()
def test_a_cross_head_that_looks_at_full_stops_is_said_to() -> None:
    """All weights are 0 but the embedding, where full stops have a channel of their own, and one head that reads it."""
    model = build(positions="none")
    tokenizer = tokenizer_of(model)
    for name, parameter in model.named_parameters():
        parameter.fill_(float("norm" in name and name.endswith("weight")))
    stop, embedding = tokenizer.backend.token_to_id("."), model.embed.tokens.weight
    embedding[:, 1] = 1
    embedding[stop, 0] = 3
    head = model.heads["cross.1.2"]
    assert isinstance(head, Head)
    head.W_Q[1, 0] = head.W_K[0, 0] = 20
    head.W_V[:] = head.W_O.mT[:] = torch.randn(head.W_V.shape, generator=torch.Generator().manual_seed(0))
    seen = profile(model, Corpus.of(DOCUMENTS))
    assert seen.roles() == {"delimiter": [head.address]}
    found = seen["cross.1.2"]
    assert (found.rung, found.rest) == ("effective", ())
    assert found.score == pytest.approx(1.0, abs=1e-3)
    assert all(context.attended == "." for context in found.hardest)
    assert seen["cross.1.3"].rest == ("broad", "idle")


def test_variability_reads_two_stacks_too() -> None:
    model = build()
    found = variability(model, Corpus.of(DOCUMENTS), "cross.1.2,enc.0.0", length=12)
    assert set(found) == {"cross.1.2", "enc.0.0"}
    texts = [ids for unit in Reading.of(model, Corpus.of(DOCUMENTS)) if len(ids := unit.ids[:12]) == 12][:16]
    ids = torch.tensor(texts)
    with torch.no_grad(), record(model, ",".join(found), what="map") as recording:
        model(ids, source=ids)
    for name, value in found.items():
        p = recording[name].map().double()  # (B, T, S)
        assert value == pytest.approx(float((p - p.mean(0)).abs().sum() / (2 * p.sum())), abs=1e-5)


def _only(dense: Rows, wanted: Callable[[str], bool]) -> Rows:
    return {name: both for name, both in dense.items() if wanted(name)}
