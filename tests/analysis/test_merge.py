"""Profiles merge: of two corpora, each read by itself, comes what one pass over both would have told."""

from typing import Any

import numpy as np
import pytest
import torch

from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.spec import AttentionSpec, ModelSpec
from headwise.text.build_tokenizers import word_tokenizer
from headwise.text.corpus import Corpus
from headwise.text.documents import Document, Relation
from headwise.text.synthetic import VOCABULARY
from tests.analysis.constructed_heads import DECODER, decoder, documents

DOCUMENTS = documents(60)
FIRST = ("variability",)  # measured on the first 16 texts; where the first corpus has fewer, the larger sample stays


def untrained(seed: int = 0) -> Transformer:
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(seed)
    attention = AttentionSpec(width=24, heads=3)
    model = Transformer(ModelSpec(vocab=len(tokenizer), context=160, layers=2, attention=attention, hidden=13))
    model.tokenizer = tokenizer
    return model


def assert_same(merged: Profile, whole: Profile, apart: tuple[str, ...] = ()) -> None:
    """All that was counted, bucket by bucket, so in both halves too; and all that follows from it."""
    assert merged.about == whole.about
    assert merged.tally.fields == whole.tally.fields
    for group in {*whole.tally.sums} - {*apart}:
        np.testing.assert_allclose(merged.tally.counts[group], whole.tally.counts[group], rtol=1e-6, err_msg=group)
        np.testing.assert_allclose(merged.tally.sums[group], whole.tally.sums[group], rtol=1e-5, atol=1e-4)
    for name in {*whole.tally.fields} - {*apart}:
        for half in (None, 0, 1):
            means = (made.tally.mean(name, half) for made in (merged, whole))
            np.testing.assert_allclose(*means, rtol=0, atol=1e-5, err_msg=name)
    assert (merged.relations is None) == (whole.relations is None)
    if merged.relations is not None and whole.relations is not None:
        assert merged.relations.questions == whole.relations.questions
        for name, array in whole.relations.arrays().items():
            np.testing.assert_allclose(merged.relations.arrays()[name], array, rtol=1e-5, atol=1e-4, err_msg=name)
    assert merged.family == whole.family
    assert merged.rests == whole.rests
    for mine, theirs in zip(merged.supports, whole.supports, strict=True):
        assert [(s.role, s.detail, s.rung, s.rows) for s in mine] == [
            (s.role, s.detail, s.rung, s.rows) for s in theirs
        ]
        for a, b in zip(mine, theirs, strict=True):
            assert (a.score, a.null, *a.interval) == pytest.approx((b.score, b.null, *b.interval), abs=1e-5)
    weights = [[[context.weight for context in some] for some in made.hardest] for made in (merged, whole)]
    assert weights[0] == [pytest.approx(some, abs=1e-5) for some in weights[1]]


@pytest.fixture(scope="module")
def whole() -> Profile:
    return profile(decoder(), DOCUMENTS, causal=False)


@pytest.mark.parametrize("at", [1, 23])
def test_of_two_corpora_comes_what_both_give(at: int, whole: Profile) -> None:
    first, second = (profile(decoder(), some, causal=False) for some in (DOCUMENTS[:at], DOCUMENTS[at:]))
    assert_same(first.merge(second), whole, FIRST if at < 16 else ())
    for made in (first.merge(second), second.merge(first)):
        larger = second if at < 16 else made
        assert np.array_equal(made.measure("variability"), larger.measure("variability"))


def test_evidence_tells_the_text_by_its_number_in_both() -> None:
    texts = [document for document in Corpus.little(documents=20, seed=2).items() if isinstance(document, Document)]
    first, second = (profile(untrained(), some, causal=False) for some in (texts[:10], texts[10:]))
    found = [context for some in first.merge(second).hardest for context in some]
    assert {context.unit < 10 for context in found} == {True, False}
    for context in found:
        words = texts[context.unit].words
        assert (context.token, context.attended) == (words[context.row], words[context.column])


def test_three_in_any_grouping(whole: Profile) -> None:
    a, b, c = (profile(decoder(), DOCUMENTS[part], causal=False) for part in (slice(9), slice(9, 40), slice(40, None)))
    assert_same(a.merge(b).merge(c), whole, FIRST)
    assert_same(a.merge(b.merge(c)), whole, FIRST)


def test_plain_text_and_documents_that_both_read(tmp_path: Any) -> None:
    """The documents apart are the same in both, so they count once; the texts of both count."""
    model, gold = untrained(), list(Corpus.little("held-out", documents=12, seed=5).items())
    texts = [document.text for document in Corpus.little(documents=30, seed=2).items()]
    options = {"relations": gold, "causal": False}
    first, second = profile(model, texts[:17], **options), profile(model, texts[17:], **options)
    assert_same(first.merge(second), profile(model, texts, **options))
    first.save(tmp_path / "first.npz")
    assert_same(Profile.load(tmp_path / "first.npz").merge(second), profile(model, texts, **options))


def test_documents_apart_that_are_not_the_same_add_up() -> None:
    model, gold = untrained(), list(Corpus.little("held-out", documents=20, seed=5).items())
    texts = [document.text for document in Corpus.little(documents=20, seed=2).items()]
    first = profile(model, texts[:5], relations=gold[:7], causal=False)
    second = profile(model, texts[5:], relations=gold[7:], causal=False)
    made, whole = first.merge(second), profile(model, texts, relations=gold, causal=False)
    made.about["relations"] = whole.about["relations"]  # how they are told apart is all that differs
    assert_same(made, whole, FIRST)


def test_questions_that_only_one_corpus_asks() -> None:
    model = untrained()
    plain = [d for d in Corpus.little("held-out", documents=16, seed=3).items() if isinstance(d, Document)]
    other = [Document.of(d.words, [Relation("aaa", 5, 2), Relation("zzz", 4, 1)]) for d in plain[:8]]
    first, second = profile(model, other, causal=False), profile(model, plain, causal=False)
    assert first.relations is not None
    assert second.relations is not None
    assert set(first.relations.questions).isdisjoint(second.relations.questions)
    assert_same(first.merge(second), profile(model, [*other, *plain], causal=False), FIRST)
    assert_same(second.merge(first), profile(model, [*plain, *other], causal=False))


def test_shuffled_texts_merge_too() -> None:
    options = {"control": "shuffled", "causal": False}
    first, second = (profile(decoder(), some, **options) for some in (DOCUMENTS[:11], DOCUMENTS[11:30]))
    assert_same(first.merge(second), profile(decoder(), DOCUMENTS[:30], **options), FIRST)


def test_what_ablation_showed_stays() -> None:
    first, second = profile(decoder(), DOCUMENTS[:40]), profile(decoder(), DOCUMENTS[40:], causal=False)
    for made in (first.merge(second), second.merge(first)):
        assert {str(head.address): head.role for head in made} == {head: role for head, (role, _) in DECODER.items()}
        for address in ("0.0", "1.0"):
            assert made[address].rung == "causal"
            assert made[address].effect == first[address].effect
            assert made[address].supports[0].effect_interval == first[address].supports[0].effect_interval
        assert made["0.2"].rung == "effective"
        assert made["0.2"].supports[0].cost is not None
    assert "causal" not in {head.rung for head in second.merge(second)}


def test_texts_read_twice_are_no_more_texts() -> None:
    """The same text falls into the same bucket: twice the rows, but not one more unit, and never one in both halves."""
    once = profile(decoder(), DOCUMENTS[:12], causal=False)
    twice = once.merge(once)
    for name in ("entropy", "aimed 1", "bracket > hits"):
        sums, counts = once.tally.per_bucket(name)
        again = twice.tally.per_bucket(name)
        assert np.array_equal(again[0], 2 * sums)
        assert np.array_equal(again[1], 2 * counts)
        np.testing.assert_allclose(twice.tally.mean(name, 1), once.tally.mean(name, 1))


def test_what_cannot_be_merged(whole: Profile) -> None:
    texts = Corpus.little(documents=6)
    made = profile(untrained(), texts, causal=False)
    with pytest.raises(HeadwiseError, match="12 and of 6 heads"):
        whole.merge(made)
    with pytest.raises(HeadwiseError, match="two models"):
        made.merge(profile(untrained(1), texts, causal=False))
    with pytest.raises(HeadwiseError, match=r"control=None and 'shuffled'"):
        made.merge(profile(untrained(), texts, control="shuffled", causal=False))
    with pytest.raises(HeadwiseError, match=r"seed=0 and 1"):
        made.merge(profile(untrained(), texts, seed=1, causal=False))
