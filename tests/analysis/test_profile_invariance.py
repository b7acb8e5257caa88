"""Profiles: the same numbers whatever the batches, blocks, sides and shards; files, tables, controls and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwise.analysis.metrics import row_blocks
from headwise.analysis.metrics.accumulator import Tally
from headwise.analysis.metrics.default_metrics import usual_measures
from headwise.analysis.metrics.relations import Relations
from headwise.analysis.metrics.runner import Runner
from headwise.analysis.metrics.token_classes import class_flags
from headwise.analysis.metrics.top_contexts import Evidence
from headwise.analysis.recording.batching import Unit, make_batches
from headwise.analysis.recording.tokenized_corpus import Reading
from headwise.analysis.roles.profile import _shuffled, profile
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address, AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from tests.analysis.constructed_heads import DECODER, decoder, documents
from tests.contract.layers import fill

LITTLE = list(Corpus.little("held-out", documents=9, seed=3).items())
GROUPED = AttentionSpec(width=24, heads=4, kv_heads=2, head_dim=6, rotary=Rotary(), window=50)


def little(kind: str = "decoder", attention: AttentionSpec = GROUPED, **fields: Any) -> Transformer:
    tokenizer = word_tokenizer(VOCABULARY)
    options = {"layers": 2, "context": 160, "hidden": 13, "positions": "none", **fields}
    model = Transformer(ModelSpec(vocab=len(tokenizer), attention=attention, kind=kind, **options))  # pyright: ignore
    fill(model)
    model.tokenizer = tokenizer
    return model.eval()


@torch.no_grad()
def gather(
    model: Transformer, units: list[Unit], tokens: int = 600, side: str = "right"
) -> tuple[Tally, Relations, list]:
    """One pass over some units of a corpus, as a profile makes it."""
    tally, evidence = Tally(len(model.heads)), Evidence(len(model.heads))
    usual = usual_measures(class_flags(model.tokenizer, model.spec.vocab))  # pyright: ignore
    relations = Relations.of(tally, Reading.of(model, LITTLE).documents(), model.spec.kind == "decoder")
    Runner(tally, [evidence, *usual, relations]).read(model, make_batches(units, tokens, side))
    return tally, relations, evidence.contexts()


def assert_same(one: Tally, other: Tally) -> None:
    assert one.fields.keys() == other.fields.keys()
    for group in one.sums:
        np.testing.assert_array_equal(one.counts[group], other.counts[group], err_msg=group)
        np.testing.assert_allclose(one.sums[group], other.sums[group], rtol=1e-5, atol=1e-4, err_msg=group)


@pytest.fixture(scope="module", params=["decoder", "encoder"])
def whole(request: pytest.FixtureRequest) -> tuple[Transformer, list[Unit], Tally, Relations, list]:
    attention = GROUPED if request.param == "decoder" else replace(GROUPED, window=None)
    model = little(request.param, attention, output="lm" if request.param == "decoder" else "none")
    units = list(Reading.of(model, LITTLE))
    return (model, units, *gather(model, units))


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 900),
    block=st.integers(9, 140),
    cells=st.sampled_from([1, 1 << 13, 1 << 19]),
    left=st.booleans(),
)
def test_batches_blocks_and_sides_change_nothing(whole: Any, tokens: int, block: int, cells: int, left: bool) -> None:
    model, units, tally, relations, evidence = whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "ROWS", block)
        patch.setattr(row_blocks, "CELLS", cells)
        other, same_relations, same_evidence = gather(model, units, tokens, "left" if left else "right")
    assert_same(tally, other)
    for name, array in relations.arrays().items():
        np.testing.assert_array_equal(array, same_relations.arrays()[name])
    weights = [[context.weight for context in some] for some in evidence]
    np.testing.assert_allclose(weights, [[context.weight for context in some] for some in same_evidence], atol=1e-5)


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.sets(st.integers(0, 8), min_size=1, max_size=8))
def test_shards_merge_into_the_whole(whole: Any, chosen: set[int]) -> None:
    model, units, tally, relations, _ = whole
    halves = [gather(model, [u for u in units if (u.number in chosen) == here]) for here in (True, False)]
    assert_same(halves[0][0].merge(halves[1][0]), tally)
    assert_same(halves[1][0].merge(halves[0][0]), tally)
    for name in relations.arrays():
        summed = getattr(halves[0][1], name) + getattr(halves[1][1], name)
        np.testing.assert_allclose(summed, getattr(relations, name), rtol=1e-4, atol=1e-4)


def test_only_tallies_that_fit_are_merged() -> None:
    with pytest.raises(HeadwiseError, match="2 and of 3 heads"):
        Tally(2).merge(Tally(3))
    one, other = Tally(1), Tally(1)
    one.add(("a", "b"), slice(0, 1), [0], torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    other.add(("a", "c"), slice(0, 1), [0], torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    with pytest.raises(HeadwiseError):  # or c would be read where b stands
        one.merge(other)


@pytest.fixture(scope="module")
def made() -> Profile:
    return profile(decoder(), documents(40))


def test_saved_and_loaded(made: Profile, tmp_path: Path) -> None:
    again = Profile.load(made.save(tmp_path / "a.npz"))
    assert again.to_dict() == made.to_dict()
    assert again.table() == made.table()
    assert again.rests == made.rests
    assert again.supports == made.supports
    assert again.hardest == made.hardest
    assert_same(again.tally, made.tally)
    assert again.relations is not None
    assert made.relations is not None
    np.testing.assert_array_equal(again.relations.coverage(), made.relations.coverage())
    json.dumps(again.to_dict(), allow_nan=False)


def test_files_that_are_refused(made: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made.save(tmp_path / "a.npz").read_bytes()
    for number, damaged in enumerate((whole[: len(whole) // 2], b"", b"{}", whole[:5000] + bytes(200) + whole[5200:])):
        (tmp_path / f"{number}.npz").write_bytes(damaged)
        with pytest.raises(HeadwiseError, match="is not a profile, or is damaged"):
            Profile.load(tmp_path / f"{number}.npz")
    with pytest.raises(HeadwiseError, match="there is no file"):
        Profile.load(tmp_path / "none.npz")
    monkeypatch.setattr("headwise.analysis.roles.profile_io.VERSION", 99)
    with pytest.raises(HeadwiseError, match=r"this is 99"):
        Profile.load(tmp_path / "a.npz")


@pytest.mark.parametrize("told", [b"[1]", b'{"version": 2}', b'{"version": 2, "heads": ["0.0"], "fields": 3}'])
def test_arrays_that_are_no_profile_are_refused(told: bytes, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", told=np.frombuffer(told, dtype=np.uint8))
    with pytest.raises(HeadwiseError):
        Profile.load(tmp_path / "other.npz")


def test_asking(made: Profile) -> None:
    assert len(made) == 12
    assert [str(head.address) for head in made] == list(DECODER)
    assert made[Address.parse("0.0")].role == made["0.0"].role == "previous token"
    best = made.best("induction")
    assert best is not None
    assert str(best.address) == "1.0"
    assert made.best("semantic") is None
    assert {role: list(map(str, heads)) for role, heads in made.roles().items()} == {
        role: [head] for head, (role, _) in DECODER.items() if role != "unclear"
    }
    np.testing.assert_allclose(made.by_layer("entropy"), made.measure("entropy").reshape(2, 6).mean(1))
    with pytest.raises(HeadwiseError, match=r"there is no head 7.7 in this profile; it has 0.0 to 1.5"):
        made["7.7"]
    with pytest.raises(HeadwiseError, match=r"'entropie' was not measured; .*entropy"):
        made.measure("entropie")


def test_a_layer_in_which_nothing_was_measured(made: Profile) -> None:
    assert np.isnan(made.by_layer("offset -1")).all(), "a decoder's head never looks ahead"


def test_tables_and_frames(made: Profile) -> None:
    table = made.table()
    assert [row["head"] for row in table] == list(DECODER)
    assert (table[0]["role"], table[1]["rest"], table[1]["score"]) == ("previous token", "sink", None)
    assert table[0]["low"] <= table[0]["score"] + 1e-9
    pandas = pytest.importorskip("pandas")
    frame = made.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == list(DECODER)
    assert frame.loc["0.0", "offset 1"] == pytest.approx(1, abs=1e-5)
    assert frame.columns.is_unique


def test_what_changed(made: Profile) -> None:
    model = decoder()
    with torch.no_grad():
        model.heads["0.0"].W_Q.zero_()  # pyright: ignore[reportAttributeAccessIssue]
    rows = {row["head"]: row for row in made.diff(profile(model, documents(40), causal=False))}
    assert (rows["0.0"]["before"], rows["0.0"]["after"]) == ("previous token", "unclear")
    assert (rows["1.0"]["before"], rows["1.0"]["after"]) == ("induction", "unclear"), (
        "it stood on the other's shoulders"
    )
    assert rows["1.1"]["before"] == rows["1.1"]["after"] == "fixed offset"
    assert rows["0.0"]["entropy"] > 1 > abs(rows["0.1"]["entropy"])
    cut = profile(little(kept={"0": (0, 3), "1": ()}), LITTLE, causal=False)
    assert [str(head.address) for head in cut] == ["0.0", "0.3"], "a layer without heads"
    gone = {row["head"]: row["after"] for row in profile(little(), LITTLE, causal=False).diff(cut)}
    assert gone["1.3"] == "absent"


def test_controls(made: Profile) -> None:
    model = decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = profile(model, documents(40), control="random-init", causal=False)
    assert set(twin.roles()) == set()
    shuffled = profile(model, documents(40), control="shuffled", causal=False)
    assert shuffled["0.0"].role == "previous token", "a fixed offset does not care"
    assert shuffled.relations is None, "words have moved, and arcs mean nothing"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    draws = [
        profile(model, documents(12), control="shuffled", seed=s, causal=False).measure("first")[9] for s in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("control", [None, "shuffled"])
def test_evidence_shows_what_was_read(control: str | None) -> None:
    """Also where tokens were shuffled: the token told is the one that looked, and the other the one before it."""
    model = decoder()
    read = {u.number: (_shuffled(u, 0) if control else u).ids for u in Reading.of(model, documents(12))}
    evidence = profile(model, documents(12), control=control, causal=False)["0.0"].hardest
    assert len(evidence) == 8
    for context in evidence:
        looked, at = (word(model, read[context.unit][place]) for place in (context.row, context.column))
        assert context.column == context.row - 1
        assert (context.token, context.attended) == (looked, at)
        assert f"*{at}* [{looked}]" in context.text


def word(model: Transformer, token: int) -> str:
    return model.tokenizer.decode([token])  # pyright: ignore[reportOptionalMemberAccess]


def test_nothing_stays_changed() -> None:
    for training in (True, False):
        model = little().train(training)
        before, ids = model.eval()(torch.tensor([[1, 2, 3]])), torch.tensor([[1, 2, 3]])
        model.train(training)
        profile(model, LITTLE[:6], every=2)
        assert model.training is training
        assert not any(site.is_open for site in model.sites())
        assert torch.equal(model.eval()(ids), before)
        assert Evidence(2).contexts() == [[], []]


def test_what_is_refused() -> None:
    model = little(positions="learned", context=40)
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        ("corpus|empty", [], {}),
        ("empty", [""], {}),
        ("'sorted': not a control", LITTLE, {"control": "sorted"}),
        (r"document \d+ has \d+ tokens, more than the 40 positions", LITTLE, {}),
        ("41 tokens are more than the 40", "the dog", {"longest": 41}),
    ]
    for match, corpus, options in refused:
        with pytest.raises(HeadwiseError, match=match):
            profile(model, corpus, **options)
    model.tokenizer = None
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        profile(model, LITTLE)
