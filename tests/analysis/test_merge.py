"""Merged profiles: two corpora profiled separately give the result of one pass over both."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.annotated_document import Document, Relation
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.synthetic import VOCABULARY
from tests.analysis.constructed_heads import DECODER, decoder, documents

DOCUMENTS = documents(60)
FIRST_TEXTS_ONLY = (
    "variability",
)  # measured on the first 16 texts; if the first corpus has fewer, the result of the larger sample is kept


def untrained_model(seed: int = 0) -> Transformer:
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(seed)
    attention = AttentionSpec(width=24, heads=3)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=160, layers=2, attention=attention, mlp_width=13))
    model.tokenizer = tokenizer
    return model


def assert_same(merged: Profile, full: Profile, excluded: tuple[str, ...] = ()) -> None:
    """Check that all counts are equal in each bucket, and all results that follow from them."""
    assert merged.metadata == full.metadata
    assert merged.accumulator.fields == full.accumulator.fields
    for group in {*full.accumulator.sums} - {*excluded}:
        np.testing.assert_allclose(
            merged.accumulator.counts[group], full.accumulator.counts[group], rtol=1e-6, err_msg=group
        )
        np.testing.assert_allclose(merged.accumulator.sums[group], full.accumulator.sums[group], rtol=1e-5, atol=1e-4)
    for name in {*full.accumulator.fields} - {*excluded}:
        for half in (None, 0, 1):
            means = (profiled.accumulator.mean(name, half) for profiled in (merged, full))
            np.testing.assert_allclose(*means, rtol=0, atol=1e-5, err_msg=name)
    assert (merged.relation_metric is None) == (full.relation_metric is None)
    if merged.relation_metric is not None and full.relation_metric is not None:
        assert merged.relation_metric.relations == full.relation_metric.relations
        for name, array in full.relation_metric.arc_count_arrays().items():
            np.testing.assert_allclose(
                merged.relation_metric.arc_count_arrays()[name], array, rtol=1e-5, atol=1e-4, err_msg=name
            )
    assert merged.family_size == full.family_size
    assert merged.idle_patterns == full.idle_patterns
    for actual, expected in zip(merged.evidence, full.evidence, strict=True):
        assert [(s.role, s.detail, s.evidence_level, s.rows) for s in actual] == [
            (s.role, s.detail, s.evidence_level, s.rows) for s in expected
        ]
        for a, b in zip(actual, expected, strict=True):
            assert (a.score, a.baseline, *a.interval) == pytest.approx((b.score, b.baseline, *b.interval), abs=1e-5)
    weights = [
        [[context.weight for context in contexts] for contexts in profiled.top_contexts] for profiled in (merged, full)
    ]
    assert weights[0] == [pytest.approx(contexts, abs=1e-5) for contexts in weights[1]]


@pytest.fixture(scope="module")
def full_profile() -> Profile:
    return profile(decoder(), DOCUMENTS, causal=False)


def test_profiles_of_layer_groups_joined_equal_single_pass(full_profile: Profile) -> None:
    parts = [profile(decoder(), DOCUMENTS, causal=False, only_layers=layers) for layers in ("1", "0")]
    assert [len(part.addresses) for part in parts] == [6, 6]
    assert parts[0].family_size < full_profile.family_size
    joined = parts[0].merge(parts[1])
    assert joined.addresses == full_profile.addresses
    assert_same(joined, full_profile)
    for name, array in full_profile.examples.arrays.items():
        np.testing.assert_allclose(joined.examples.arrays[name], array, atol=1e-6, err_msg=name)
    for address in map(str, full_profile.addresses):
        assert joined[address].role == full_profile[address].role


@pytest.mark.slow
def test_joined_layer_groups_keep_causal_results_and_reload(tmp_path: Path) -> None:
    parts = [profile(decoder(), DOCUMENTS, only_layers=layers) for layers in ("0", "1")]
    tested = {str(head.address): head.evidence_level for part in parts for head in part}
    for index, part in enumerate(parts):
        part.save(tmp_path / f"{index}.npz")
    joined = Profile.load(tmp_path / "0.npz").merge(Profile.load(tmp_path / "1.npz"))
    assert "causal" in tested.values()
    assert {str(head.address): head.evidence_level for head in joined} == tested


@pytest.mark.parametrize("layers", ["2", "x", "", "dec.0"])
def test_layers_that_do_not_exist_raise(layers: str) -> None:
    with pytest.raises(HeadwiseError, match=r"layers=.*the model does not have these layers"):
        profile(decoder(), DOCUMENTS[:2], only_layers=layers)


def test_layer_groups_of_different_corpora_cannot_be_joined() -> None:
    first = profile(decoder(), DOCUMENTS[:3], causal=False, only_layers="0")
    second = profile(decoder(), DOCUMENTS[:4], causal=False, only_layers="1")
    with pytest.raises(HeadwiseError, match="profiles of different layers"):
        first.merge(second)
    with pytest.raises(HeadwiseError, match=r"layers=.*prompts=True"):
        profile(decoder(), DOCUMENTS[:3], only_layers="0", prompts=True)


@pytest.mark.parametrize("at", [1, 23])
def test_profile_merge_equals_single_pass(at: int, full_profile: Profile) -> None:
    first, second = (profile(decoder(), docs, causal=False) for docs in (DOCUMENTS[:at], DOCUMENTS[at:]))
    assert_same(first.merge(second), full_profile, FIRST_TEXTS_ONLY if at < 16 else ())
    for merged in (first.merge(second), second.merge(first)):
        larger = second if at < 16 else merged
        assert np.array_equal(merged.metric("variability"), larger.metric("variability"))


def test_profile_merge_renumbers_texts_of_contexts() -> None:
    texts = [document for document in Corpus.synthetic(documents=20, seed=2).items() if isinstance(document, Document)]
    first, second = (profile(untrained_model(), docs, causal=False) for docs in (texts[:10], texts[10:]))
    contexts = [context for docs in first.merge(second).top_contexts for context in docs]
    assert {context.sample < 10 for context in contexts} == {True, False}
    for context in contexts:
        words = texts[context.sample].words
        assert (context.token, context.attended) == (words[context.row], words[context.column])


def test_profile_merge_is_associative(full_profile: Profile) -> None:
    a, b, c = (profile(decoder(), DOCUMENTS[part], causal=False) for part in (slice(9), slice(9, 40), slice(40, None)))
    assert_same(a.merge(b).merge(c), full_profile, FIRST_TEXTS_ONLY)
    assert_same(a.merge(b.merge(c)), full_profile, FIRST_TEXTS_ONLY)


def test_profile_merge_counts_shared_relations_once(tmp_path: Any) -> None:
    """The relation documents are the same in both profiles, so they count once. The texts of both count."""
    model, gold = untrained_model(), list(Corpus.synthetic("held-out", documents=12, seed=5).items())
    texts = [document.text for document in Corpus.synthetic(documents=30, seed=2).items()]
    options = {"relations": gold, "causal": False}
    first, second = profile(model, texts[:17], **options), profile(model, texts[17:], **options)
    assert_same(first.merge(second), profile(model, texts, **options))
    first.save(tmp_path / "first.npz")
    assert_same(Profile.load(tmp_path / "first.npz").merge(second), profile(model, texts, **options))


def test_profile_merge_adds_different_relations() -> None:
    model, gold = untrained_model(), list(Corpus.synthetic("held-out", documents=20, seed=5).items())
    texts = [document.text for document in Corpus.synthetic(documents=20, seed=2).items()]
    first = profile(model, texts[:5], relations=gold[:7], causal=False)
    second = profile(model, texts[5:], relations=gold[7:], causal=False)
    merged, full = first.merge(second), profile(model, texts, relations=gold, causal=False)
    merged.metadata["relations"] = full.metadata["relations"]  # only the description of the source differs
    assert_same(merged, full, FIRST_TEXTS_ONLY)


def test_profile_merge_keeps_relations_of_one_corpus() -> None:
    model = untrained_model()
    plain = [d for d in Corpus.synthetic("held-out", documents=16, seed=3).items() if isinstance(d, Document)]
    other = [Document.of(d.words, [Relation("aaa", 5, 2), Relation("zzz", 4, 1)]) for d in plain[:8]]
    first, second = profile(model, other, causal=False), profile(model, plain, causal=False)
    assert first.relation_metric is not None
    assert second.relation_metric is not None
    assert set(first.relation_metric.relations).isdisjoint(second.relation_metric.relations)
    assert_same(first.merge(second), profile(model, [*other, *plain], causal=False), FIRST_TEXTS_ONLY)
    assert_same(second.merge(first), profile(model, [*plain, *other], causal=False))


def test_profile_merge_shuffled_control_equals_single_pass() -> None:
    options = {"control": "shuffled", "causal": False}
    first, second = (profile(decoder(), docs, **options) for docs in (DOCUMENTS[:11], DOCUMENTS[11:30]))
    assert_same(first.merge(second), profile(decoder(), DOCUMENTS[:30], **options), FIRST_TEXTS_ONLY)


def test_profile_merge_keeps_causal_effects() -> None:
    first, second = profile(decoder(), DOCUMENTS[:40]), profile(decoder(), DOCUMENTS[40:], causal=False)
    for merged in (first.merge(second), second.merge(first)):
        assert {str(head.address): head.role for head in merged} == {head: role for head, (role, _) in DECODER.items()}
        for address in ("0.0", "1.0"):
            assert merged[address].evidence_level == "causal"
            assert merged[address].effect == first[address].effect
            assert merged[address].evidence[0].effect_interval == first[address].evidence[0].effect_interval
        assert merged["0.2"].evidence_level == "value-weighted"
        assert merged["0.2"].evidence[0].cost is not None
    assert "causal" not in {head.evidence_level for head in second.merge(second)}


def test_profile_merge_same_texts_add_no_units() -> None:
    """Equal texts have the same bucket: the number of rows doubles, the number of units does not, and no text is in both
    halves."""
    once = profile(decoder(), DOCUMENTS[:12], causal=False)
    twice = once.merge(once)
    for name in ("entropy", "aimed 1", "bracket > hits"):
        sums, counts = once.accumulator.bucket_sums_and_counts(name)
        again = twice.accumulator.bucket_sums_and_counts(name)
        assert np.array_equal(again[0], 2 * sums)
        assert np.array_equal(again[1], 2 * counts)
        np.testing.assert_allclose(twice.accumulator.mean(name, 1), once.accumulator.mean(name, 1))


def test_profile_merge_different_profiles_raises(full_profile: Profile) -> None:
    texts = Corpus.synthetic(documents=6)
    profiled = profile(untrained_model(), texts, causal=False)
    with pytest.raises(HeadwiseError, match="12 and 6 heads"):
        full_profile.merge(profiled)
    with pytest.raises(HeadwiseError, match="two different models"):
        profiled.merge(profile(untrained_model(1), texts, causal=False))
    with pytest.raises(HeadwiseError, match=r"different control .* Got None and 'shuffled'"):
        profiled.merge(profile(untrained_model(), texts, control="shuffled", causal=False))
    with pytest.raises(HeadwiseError, match=r"different seed .* Got 0 and 1"):
        profiled.merge(profile(untrained_model(), texts, seed=1, causal=False))
