"""Profiles: scores do not depend on batches, blocks, padding side or shards; files, tables, controls and errors."""

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
from headwise.analysis.metrics.accumulator import Accumulator
from headwise.analysis.metrics.default_metrics import default_metrics
from headwise.analysis.metrics.metric_runner import MetricRunner
from headwise.analysis.metrics.relation_metric import RelationMetric
from headwise.analysis.metrics.token_classes import token_class_flags
from headwise.analysis.metrics.top_contexts import TopContexts
from headwise.analysis.recording.batching import TextSample, make_batches
from headwise.analysis.recording.tokenized_corpus import TokenizedCorpus
from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.roles.profile_sums import _shuffle_tokens
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import Address, AttentionSpec, ModelSpec, Rotary
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from tests.analysis.constructed_heads import DECODER, decoder, documents
from tests.contract.layers import randomize

SYNTHETIC = list(Corpus.synthetic("held-out", documents=9, seed=3).items())
GROUPED = AttentionSpec(width=24, heads=4, kv_heads=2, head_dim=6, rotary=Rotary(), window=50)


def synthetic_model(kind: str = "decoder", attention: AttentionSpec = GROUPED, **fields: Any) -> Transformer:
    tokenizer = word_tokenizer(VOCABULARY)
    options = {"layers": 2, "context": 160, "mlp_width": 13, "positions": "none", **fields}
    model = Transformer(ModelSpec(vocab=len(tokenizer), attention=attention, kind=kind, **options))  # pyright: ignore
    randomize(model)
    model.tokenizer = tokenizer
    return model.eval()


@torch.no_grad()
def collect_metrics(
    model: Transformer, samples: list[TextSample], batch_tokens: int = 600, side: str = "right"
) -> tuple[Accumulator, RelationMetric, list]:
    """Run one pass over some samples of a corpus, as in a profile."""
    accumulator, evidence = Accumulator(len(model.heads)), TopContexts(len(model.heads))
    metrics = default_metrics(token_class_flags(model.tokenizer, model.spec.vocab))  # pyright: ignore
    relations = RelationMetric.of(
        accumulator, TokenizedCorpus.of(model, SYNTHETIC).relation_documents(), model.spec.kind == "decoder"
    )
    runner = MetricRunner(accumulator, [*metrics, relations], observers=[evidence])
    runner.run(model, make_batches(samples, batch_tokens, side))
    return accumulator, relations, evidence.contexts()


def assert_same(actual: Accumulator, expected: Accumulator) -> None:
    assert actual.fields.keys() == expected.fields.keys()
    for group in actual.sums:
        np.testing.assert_array_equal(actual.counts[group], expected.counts[group], err_msg=group)
        np.testing.assert_allclose(actual.sums[group], expected.sums[group], rtol=1e-5, atol=1e-4, err_msg=group)


@pytest.fixture(scope="module", params=["decoder", "encoder"])
def reference_run(
    request: pytest.FixtureRequest,
) -> tuple[Transformer, list[TextSample], Accumulator, RelationMetric, list]:
    attention = GROUPED if request.param == "decoder" else replace(GROUPED, window=None)
    model = synthetic_model(request.param, attention, output="lm" if request.param == "decoder" else "none")
    samples = list(TokenizedCorpus.of(model, SYNTHETIC))
    return (model, samples, *collect_metrics(model, samples))


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 900),
    block=st.integers(9, 140),
    cells=st.sampled_from([1, 1 << 13, 1 << 19]),
    left=st.booleans(),
)
def test_metrics_do_not_depend_on_batches_blocks_or_padding_side(
    reference_run: Any, tokens: int, block: int, cells: int, left: bool
) -> None:
    model, samples, accumulator, relations, evidence = reference_run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "BLOCK_ROWS", block)
        patch.setattr(row_blocks, "BLOCK_CELLS", cells)
        other, same_relations, same_evidence = collect_metrics(model, samples, tokens, "left" if left else "right")
    assert_same(accumulator, other)
    for name, array in relations.arc_count_arrays().items():
        np.testing.assert_array_equal(array, same_relations.arc_count_arrays()[name])
    weights = [[context.weight for context in contexts] for contexts in evidence]
    np.testing.assert_allclose(
        weights, [[context.weight for context in contexts] for contexts in same_evidence], atol=1e-5
    )


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.sets(st.integers(0, 8), min_size=1, max_size=8))
def test_accumulator_merge_of_shards_equals_single_pass(reference_run: Any, chosen: set[int]) -> None:
    model, samples, accumulator, relations, _ = reference_run
    halves = [
        collect_metrics(model, [sample for sample in samples if (sample.index in chosen) == is_chosen])
        for is_chosen in (True, False)
    ]
    assert_same(halves[0][0].merge(halves[1][0]), accumulator)
    assert_same(halves[1][0].merge(halves[0][0]), accumulator)
    for name in relations.arc_count_arrays():
        summed = getattr(halves[0][1], name) + getattr(halves[1][1], name)
        np.testing.assert_allclose(summed, getattr(relations, name), rtol=1e-4, atol=1e-4)


def test_accumulator_merge_with_different_fields_raises() -> None:
    with pytest.raises(HeadwiseError, match="2 and 3 heads"):
        Accumulator(2).merge(Accumulator(3))
    first, second = Accumulator(1), Accumulator(1)
    first.add(("a", "b"), slice(0, 1), [0], torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    second.add(("a", "c"), slice(0, 1), [0], torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    with pytest.raises(HeadwiseError):  # otherwise c would be returned for b
        first.merge(second)


@pytest.fixture(scope="module")
def constructed_profile() -> Profile:
    return profile(decoder(), documents(40))


def test_profile_save_and_load_round_trip(constructed_profile: Profile, tmp_path: Path) -> None:
    loaded = Profile.load(constructed_profile.save(tmp_path / "a.npz"))
    assert loaded.to_dict() == constructed_profile.to_dict()
    assert loaded.table() == constructed_profile.table()
    assert loaded.idle_patterns == constructed_profile.idle_patterns
    assert loaded.evidence == constructed_profile.evidence
    assert loaded.top_contexts == constructed_profile.top_contexts
    assert_same(loaded.accumulator, constructed_profile.accumulator)
    assert loaded.relation_metric is not None
    assert constructed_profile.relation_metric is not None
    np.testing.assert_array_equal(
        loaded.relation_metric.comparable_row_fraction(), constructed_profile.relation_metric.comparable_row_fraction()
    )
    json.dumps(loaded.to_dict(), allow_nan=False)


def test_profile_load_invalid_file_raises(
    constructed_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_bytes = constructed_profile.save(tmp_path / "a.npz").read_bytes()
    for index, damaged in enumerate(
        (file_bytes[: len(file_bytes) // 2], b"", b"{}", file_bytes[:5000] + bytes(200) + file_bytes[5200:])
    ):
        (tmp_path / f"{index}.npz").write_bytes(damaged)
        with pytest.raises(HeadwiseError, match="not a profile, or damaged"):
            Profile.load(tmp_path / f"{index}.npz")
    with pytest.raises(HeadwiseError, match="file not found"):
        Profile.load(tmp_path / "none.npz")
    monkeypatch.setattr("headwise.analysis.roles.profile_io.VERSION", 99)
    with pytest.raises(HeadwiseError, match="reads version 99"):
        Profile.load(tmp_path / "a.npz")


@pytest.mark.parametrize("metadata", [b"[1]", b'{"version": 2}', b'{"version": 2, "heads": ["0.0"], "fields": 3}'])
def test_profile_load_foreign_arrays_raises(metadata: bytes, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", header=np.frombuffer(metadata, dtype=np.uint8))
    with pytest.raises(HeadwiseError):
        Profile.load(tmp_path / "other.npz")


def test_profile_lookup_by_head_role_and_metric(constructed_profile: Profile) -> None:
    assert len(constructed_profile) == 12
    assert [str(head.address) for head in constructed_profile] == list(DECODER)
    assert constructed_profile[Address.parse("0.0")].role == constructed_profile["0.0"].role == "previous token"
    best = constructed_profile.best_head("induction")
    assert best is not None
    assert str(best.address) == "1.0"
    assert constructed_profile.best_head("semantic") is None
    assert {role: list(map(str, heads)) for role, heads in constructed_profile.heads_by_role().items()} == {
        role: [head] for head, (role, _) in DECODER.items() if role != "unclear"
    }
    np.testing.assert_allclose(
        constructed_profile.mean_by_layer("entropy"), constructed_profile.metric("entropy").reshape(2, 6).mean(1)
    )
    with pytest.raises(HeadwiseError, match=r"no head 7.7. It has 12 heads, 0.0 to 1.5"):
        constructed_profile["7.7"]
    with pytest.raises(HeadwiseError, match=r"'entropie' was not measured; .*entropy"):
        constructed_profile.metric("entropie")


def test_profile_by_layer_unmeasured_metric_is_nan(constructed_profile: Profile) -> None:
    assert np.isnan(constructed_profile.mean_by_layer("offset -1")).all(), "a decoder's head never looks ahead"


def test_profile_table_and_frame_have_one_row_per_head(constructed_profile: Profile) -> None:
    table = constructed_profile.table()
    assert [row["head"] for row in table] == list(DECODER)
    assert (table[0]["role"], table[1]["idle_pattern"], table[1]["score"]) == ("previous token", "sink", None)
    assert table[0]["low"] <= table[0]["score"] + 1e-9
    pandas = pytest.importorskip("pandas")
    frame = constructed_profile.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == list(DECODER)
    assert frame.loc["0.0", "offset 1"] == pytest.approx(1, abs=1e-5)
    assert frame.columns.is_unique


def test_profile_diff_reports_changed_and_absent_heads(constructed_profile: Profile) -> None:
    model = decoder()
    with torch.no_grad():
        model.heads["0.0"].W_Q.zero_()  # pyright: ignore[reportAttributeAccessIssue]
    rows = {row["head"]: row for row in constructed_profile.diff(profile(model, documents(40), causal=False))}
    assert (rows["0.0"]["before"], rows["0.0"]["after"]) == ("previous token", "unclear")
    assert (rows["1.0"]["before"], rows["1.0"]["after"]) == ("induction", "unclear"), (
        "it stood on the other's shoulders"
    )
    assert rows["1.1"]["before"] == rows["1.1"]["after"] == "fixed offset"
    assert rows["0.0"]["entropy"] > 1 > abs(rows["0.1"]["entropy"])
    pruned = profile(synthetic_model(kept_heads={"0": (0, 3), "1": ()}), SYNTHETIC, causal=False)
    assert [str(head.address) for head in pruned] == ["0.0", "0.3"], "a layer without heads"
    roles_after = {
        row["head"]: row["after"] for row in profile(synthetic_model(), SYNTHETIC, causal=False).diff(pruned)
    }
    assert roles_after["1.3"] == "absent"


def test_profile_controls_leave_model_unchanged(constructed_profile: Profile) -> None:
    model = decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = profile(model, documents(40), control="random-init", causal=False)
    assert set(twin.heads_by_role()) == set()
    shuffled = profile(model, documents(40), control="shuffled", causal=False)
    assert shuffled["0.0"].role == "previous token", "a fixed offset does not care"
    assert shuffled.relation_metric is None, "words have moved, and arcs mean nothing"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    draws = [
        profile(model, documents(12), control="shuffled", seed=s, causal=False).metric("first")[9] for s in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("control", [None, "shuffled"])
def test_profile_contexts_show_tokens_read(control: str | None) -> None:
    """Also for shuffled tokens: the reported token is the query, and the other token the one before it."""
    model = decoder()
    read = {u.index: (_shuffle_tokens(u, 0) if control else u).ids for u in TokenizedCorpus.of(model, documents(12))}
    contexts = profile(model, documents(12), control=control, causal=False)["0.0"].top_contexts
    assert len(contexts) == 8
    for context in contexts:
        query_word, key_word = (
            decode_token(model, read[context.sample][position]) for position in (context.row, context.column)
        )
        assert context.column == context.row - 1
        assert (context.token, context.attended) == (query_word, key_word)
        assert f"*{key_word}* [{query_word}]" in context.text


def decode_token(model: Transformer, token: int) -> str:
    return model.tokenizer.decode([token])  # pyright: ignore[reportOptionalMemberAccess]


def test_profile_with_stride_leaves_model_unchanged() -> None:
    for training in (True, False):
        model = synthetic_model().train(training)
        before, ids = model.eval()(torch.tensor([[1, 2, 3]])), torch.tensor([[1, 2, 3]])
        model.train(training)
        profile(model, SYNTHETIC[:6], row_stride=2)
        assert model.training is training
        assert not any(hook_point.is_active for hook_point in model.hook_points())
        assert torch.equal(model.eval()(ids), before)
        assert TopContexts(2).contexts() == [[], []]


def test_profile_invalid_corpus_or_options_raise() -> None:
    model = synthetic_model(positions="learned", context=40)
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        ("corpus|empty", [], {}),
        ("empty", [""], {}),
        ("'sorted': unknown control", SYNTHETIC, {"control": "sorted"}),
        (r"document \d+ has \d+ tokens.*40 positions", SYNTHETIC, {}),
        ("max_length=41: larger than the context", "the dog", {"max_length": 41}),
    ]
    for match, corpus, options in refused:
        with pytest.raises(HeadwiseError, match=match):
            profile(model, corpus, **options)
    model.tokenizer = None
    with pytest.raises(HeadwiseError, match="no tokenizer"):
        profile(model, SYNTHETIC)
