"""What is shown for a role: its own cases, from the half for reporting, hits and misses as often as they are."""

from functools import cache

import numpy as np
import pytest
import torch

from headwise.analysis.metrics import role_examples as module
from headwise.analysis.metrics.metric import Target
from headwise.analysis.metrics.role_examples import ARCS, SHOWN, Cases, Example, Place, marked, written
from headwise.analysis.recording.text_buckets import BUCKETS, bucket_of, in_half
from headwise.analysis.roles.profile import in_words, profile
from headwise.analysis.roles.profile_result import Profile
from headwise.model import Transformer
from headwise.text.corpus import Corpus
from headwise.text.documents import Document
from tests.analysis.constructed_heads import decoder, documents


@cache
def made() -> tuple[Transformer, tuple[Document, ...], Profile]:
    model, texts = decoder(), tuple(documents(60))
    return model, texts, profile(model, list(texts), causal=False)


def shown(found: tuple[Example, ...]) -> list[tuple[bool, str, str, str]]:
    return [(one.hit, one.token, one.meant, one.text) for one in found]


def test_cases_of_a_relation_are_its_arcs() -> None:
    """0.3 looks from closing words to the ones that open: each case is such a pair, and of a text for reporting."""
    _, texts, found = made()
    head = found["0.3"]
    assert head.role == "bracket"
    assert found.relations is not None
    filled = np.bincount([bucket_of(text.text) for text in texts], minlength=BUCKETS)
    reporting = in_half(filled, 1)  # every text has brackets
    pairs = {(text.words[arc.source], text.words[arc.target], text.text) for text in texts for arc in text.relations}
    assert len(head.evidence) == SHOWN
    for one in head.evidence:
        around = one.text.replace("[", "").replace("]", "").replace("*", "").split(" … ")
        there = [p for p in pairs if p[:2] == (one.token, one.meant) and all(part in p[2] for part in around)]
        assert there, one.text
        assert all(reporting[bucket_of(text)] for _, _, text in there)
        assert one.hit
        assert one.weight == pytest.approx(1, abs=1e-3)
        assert one.attended == one.meant


def test_cases_of_offsets_classes_and_repeats() -> None:
    _, _, found = made()
    for one in found["0.0"].evidence:  # previous token: it stands right before
        assert f"*{one.attended}* [{one.token}]" in one.text
        assert one.hit
    for one in found["1.3"].evidence:  # digits: rows that see one
        assert one.meant.isdigit()
    for one in found["1.0"].evidence:  # induction: behind the same token, said before
        words = one.text.replace("…", "").split()
        assert words[words.index(f"*{one.attended}*") - 1] == one.token
    assert found["1.0"].on == "random tokens said twice"
    assert found["0.0"].on == found["0.3"].on == "the documents given"
    assert found["0.1"].evidence == ()
    assert found["0.0"].hardest


def hand_made(hits: int, misses: int) -> Cases:
    """One head, one question; places whose text is their own number; all in bucket 0, one more in bucket 1."""
    places = tuple(
        Place("det >", key, int(key == 99), key, 0, (f"a{key}", "b", "c"), (1,)) for key in (*range(hits + misses), 99)
    )
    made = Cases(1, places)
    for number in range(len(places)):
        hit = number < hits
        for name, value in (
            ("hit", hit),
            ("weight", 0.75 if hit else 0.125),
            ("best", 1 if hit else 2),
            ("most", 0.75),
        ):
            made.arrays[name][number, 0] = value
    made.arrays["met"][:] = 1
    return made


@pytest.mark.parametrize(("share", "hits"), [(1.0, 8), (0.75, 6), (0.5, 4), (0.1, 1), (0.0, 0)])
def test_hits_and_misses_in_proportion(share: float, hits: int) -> None:
    half = np.zeros(BUCKETS, dtype=bool)
    half[0] = True
    found = hand_made(10, 10).examples(Target("arc", "det >"), half, 0, share)
    assert (sum(one.hit for one in found), len(found)) == (hits, 8)
    miss = [one for one in found if not one.hit]
    assert all((one.weight, one.attended, one.meant, one.most) == (0.125, "c", "b", 0.75) for one in miss)
    assert not any("a99" in one.text for one in found), "of the other half"


def test_where_there_are_too_few_fewer_are_shown() -> None:
    half = np.ones(BUCKETS, dtype=bool)
    found = hand_made(2, 10).examples(Target("arc", "det >"), half, 0, 0.5)
    assert (sum(one.hit for one in found), len(found)) == (2, 5), "two of five is as near as two hits come"
    assert hand_made(2, 2).examples(Target("arc", "obj >"), half, 0, 0.5) == ()


def test_the_same_however_texts_are_read(tmp_path) -> None:
    model, texts, found = made()
    again = [
        profile(model, list(order), causal=False, tokens=tokens) for order, tokens in ((texts, 100), (texts[::-1], 999))
    ]
    halves = [profile(model, list(part), causal=False) for part in (texts[:17], texts[17:])]
    for other in (*again, halves[0].merge(halves[1]), halves[1].merge(halves[0])):
        for head in found:
            mine, theirs = head.cases, other[head.address].cases
            assert {role: shown(some) for role, some in mine.items()} == {role: shown(s) for role, s in theirs.items()}
            for role, some in mine.items():
                np.testing.assert_allclose([x.weight for x in some], [x.weight for x in theirs[role]], atol=1e-5)
    back = Profile.load(found.save(tmp_path / "made.npz"))
    assert [head.cases for head in back] == [head.cases for head in found]
    assert found["0.3"].to_dict()["evidence"][0]["hit"] is True


def test_no_more_is_kept_than_said() -> None:
    _, _, found = made()
    assert len([place for place in found.cases.arcs if place.question == "bracket >"]) == ARCS
    assert len(found.cases.rows) <= module.ROWS + 64
    assert found.cases.arrays["weight"].dtype == np.float32


def test_texts_are_marked() -> None:
    names = [f"w{i}" for i in range(100)]
    parts = marked(names, {90: "token", 10: "attended", 50: "meant"})
    assert written(parts) == (
        "w7 w8 w9 *w10* w11 w12 w13 … w47 w48 w49 {w50} w51 w52 w53 … w87 w88 w89 [w90] w91 w92 w93"
    )
    assert torch.tensor([len(kind) > 0 for kind, _ in parts]).sum() == 3


def test_texts_are_named_in_words(tmp_path) -> None:
    """A role's name claims no more than was tested, so what it was tested on stands beside it."""
    for name, told in (("gap-development.tsv", "names in GAP"), ("en_ewt-ud-test.conllu", "en_ewt-ud-test.conllu")):
        (tmp_path / name).write_text("x", encoding="utf-8")
        assert in_words(Corpus.of(tmp_path / name)) == told


def test_merging_forgets_a_long_text_that_was_driven_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One place is kept of two: the shorter text has the smaller key, beside a longer one whose array was wider."""
    monkeypatch.setitem(module.MOST, "rows", 1)
    short, long, other = (Place("", key, 0, key, 1, ("w",) * length) for key, length in ((1, 3), (9, 5), (4, 4)))
    one, two = Cases(1, (), (short, long)), Cases(1, (), (other,))
    one.arrays["maps"][0, 0, :3], one.arrays["met"][0] = (0.5, 0.25, 0.25), 1
    for merged in (one.merge(two), two.merge(one)):
        assert merged.rows == (short,)
        assert merged.arrays["maps"].tolist() == [[[0.5, 0.25, 0.25]]]
        assert merged.arrays["met"].tolist() == [1]
