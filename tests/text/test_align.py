"""Tokens, words and characters: each token knows its word, whatever cut the text."""

import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.text import Alignment
from headwise.text.probe import probe_set
from headwise.text.treebank import read_documents
from tests.parity.real import minilm_folder, smollm2_folder
from tests.parity.sentences import SENTENCES

DATA = Path(os.environ.get("HEADWISE_DATA", Path(__file__).parent.parent.parent.parent / "shared" / "data"))


@cache
def tokenizer(kind: str) -> hw.Tokenizer:
    return hw.Tokenizer.load({"smollm2": smollm2_folder, "minilm": minilm_folder}[kind]())


KINDS = ["smollm2", "minilm"]  # byte-level and WordPiece


def words_with_tokens(found: Alignment) -> list[tuple[str, list[str]]]:
    return [
        (word, [found.text[slice(*found.spans[token])] for token in places])
        for word, places in zip(found.words, found.tokens_of_word, strict=True)
    ]


def test_spaces_belong_to_no_word() -> None:
    found = tokenizer("smollm2").align("The cat  sat")
    assert found.words == ("The", "cat", "sat")
    assert [found.text[a:b] for a, b in found.spans if found.text[a:b].strip()] == ["The", "cat", "sat"]
    spaces = [
        token for token, span in zip(found.tokens, found.spans, strict=True) if found.text[slice(*span)].isspace()
    ]
    assert spaces == ["Ġ"]
    assert found.words_of_token[found.tokens.index("Ġ")] == ()


@pytest.mark.parametrize("kind", KINDS)
def test_contractions_are_one_word_and_marks_are_their_own(kind: str) -> None:
    found = tokenizer(kind).align("It didn't, no.", special=False)
    assert found.words == ("It", "didn't", ",", "no", ".")
    assert found.word_spans == ((0, 2), (3, 9), (9, 10), (11, 13), (13, 14))
    pieces = dict(words_with_tokens(found))
    assert "".join(pieces["didn't"]) == "didn't"
    assert len(pieces["didn't"]) >= 2
    assert pieces[","] == [","]


def test_split_words_keep_their_pieces_together() -> None:
    found = tokenizer("minilm").align("Antidisestablishmentarianism wins")
    assert found.tokens[0] == "[CLS]"
    assert found.tokens[-1] == "[SEP]"
    assert found.words_of_token[0] == found.words_of_token[-1] == ()
    assert found.spans[0] == found.spans[-1] == (0, 0)
    first, second = found.tokens_of_word
    assert len(first) > 3
    assert found.text[found.spans[first[0]][0] : found.spans[first[-1]][1]] == "Antidisestablishmentarianism"
    assert [found.tokens[i] for i in second] == ["wins"]


def test_an_emoji_of_several_tokens_is_one_word() -> None:
    found = tokenizer("smollm2").align("so 🦜 flew")
    assert found.words == ("so", "🦜", "flew")
    assert len(found.tokens_of_word[1]) > 1
    assert all(found.text[slice(*found.spans[i])] == "🦜" for i in found.tokens_of_word[1])
    assert found.tokens_of_word[2] == (len(found.tokens) - 1,)


@pytest.mark.parametrize("kind", KINDS)
def test_given_words_are_used_as_they_are(kind: str) -> None:
    text = "We don't know New York."
    found = tokenizer(kind).align(text, words=["We", "do", "n't", "know", "New York", "."])
    assert found.words == ("We", "do", "n't", "know", "New York", ".")
    pieces = dict(words_with_tokens(found))
    assert pieces["do"] == ["don"]  # a token of both words
    assert "".join(pieces["n't"]) == "don't"
    assert pieces["New York"] == ["New", "York"]
    with pytest.raises(hw.HeadwiseError, match=r"'lost' is not in the text behind character 2; give words in order"):
        tokenizer(kind).align(text, words=["We", "lost"])
    with pytest.raises(hw.HeadwiseError, match="not in the text behind"):
        tokenizer(kind).align(text, words=["know", "We"])
    with pytest.raises(hw.HeadwiseError, match="not in the text"):
        tokenizer(kind).align(text, words=[""])


def test_some_words_only() -> None:
    found = tokenizer("minilm").align("one two three", words=["two"], special=False)
    assert found.words_of_token == ((), (0,), ())
    assert found.tokens_of_word == ((1,),)


def test_a_token_belongs_to_every_word_it_touches() -> None:
    """SmolLM2 writes a comma and the quote behind it as one token."""
    found = tokenizer("smollm2").align('"Go," she said.', special=False)
    assert found.words == ('"', "Go", ",", '"', "she", "said", ".")
    assert [found.text[slice(*span)] for span in found.spans] == ['"', "Go", ',"', "she", "said", "."]
    assert found.words_of_token == ((0,), (1,), (2, 3), (4,), (5,), (6,))
    assert found.tokens_of_word == ((0,), (1,), (2,), (2,), (3,), (4,), (5,))


@pytest.mark.parametrize("kind", KINDS)
def test_every_word_of_the_probe_set_has_a_token(kind: str) -> None:
    for document in probe_set():
        found = tokenizer(kind).align(document.text, document.words)
        assert all(found.tokens_of_word), document.text


@pytest.mark.skipif(not DATA.is_dir(), reason="no data at $HEADWISE_DATA; docs/text.md says where to get it")
@pytest.mark.parametrize("kind", KINDS)
def test_every_arc_of_a_treebank_has_tokens(kind: str) -> None:
    arcs = 0
    for path in sorted(DATA.glob("ud-english-ewt/*.conllu")):
        for document in read_documents(path):
            places = tokenizer(kind).align(document.text, document.words).tokens_of_word
            assert all(places[arc.source] and places[arc.target] for arc in document.relations), document.text
            arcs += len(document.relations)
    assert arcs == 46163  # by `awk '$1 ~ /^[0-9]+$/ && $7 != 0'` over both files


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_align(kind: str) -> None:
    for text in ("", "  \n"):
        found = tokenizer(kind).align(text)
        assert found.words == ()
        assert not any(found.words_of_token)


def holds(kind: str, text: str) -> None:
    """The laws of an alignment."""
    found = tokenizer(kind).align(text)
    assert list(found.ids) == tokenizer(kind).encode(text)
    assert len(found.ids) == len(found.tokens) == len(found.spans) == len(found.words_of_token)
    owner = {place: n for n, span in enumerate(found.word_spans) for place in range(*span)}
    assert set(owner) == {place for place, letter in enumerate(text) if not letter.isspace()}
    for span, words in zip(found.spans, found.words_of_token, strict=True):
        visible = [place for place in range(*span) if not text[place].isspace()]
        assert list(words) == sorted({owner[place] for place in visible})
    for places in found.tokens_of_word:
        assert list(places) == list(range(places[0], places[-1] + 1)) if places else True
    said = [words[0] for words in found.words_of_token if words]
    assert said == sorted(said)


@pytest.mark.parametrize("kind", KINDS)
def test_the_laws_hold_for_sentences(kind: str) -> None:
    for text in SENTENCES:
        holds(kind, text)
        holds(kind, f"  {text}\n\n{text} ")


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from("abcXYZ0129 .,'’-_!?\n\téñ中文🦜👩\u200d\u0301ßﬁ"), max_size=40))
@settings(max_examples=150, deadline=None)
def test_the_laws_hold_for_any_mixture(kind: str, text: str) -> None:
    holds(kind, text)
