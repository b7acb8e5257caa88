"""Alignment of tokens, words and characters, for every tokenizer."""

import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.text import Alignment
from headwise.text.annotated_documents import read_documents
from headwise.text.probe import probe_set
from tests.parity.real import minilm_folder, smollm2_folder
from tests.parity.sentences import SENTENCES

DATA = Path(os.environ.get("HEADWISE_DATA", Path(__file__).parent.parent.parent.parent / "shared" / "data"))


@cache
def load_tokenizer(kind: str) -> hw.Tokenizer:
    return hw.Tokenizer.load({"smollm2": smollm2_folder, "minilm": minilm_folder}[kind]())


KINDS = ["smollm2", "minilm"]  # byte-level and WordPiece


def words_with_tokens(alignment: Alignment) -> list[tuple[str, list[str]]]:
    return [
        (word, [alignment.text[slice(*alignment.spans[token])] for token in token_indices])
        for word, token_indices in zip(alignment.words, alignment.tokens_of_word, strict=True)
    ]


def test_align_spaces_belong_to_no_word() -> None:
    alignment = load_tokenizer("smollm2").align("The cat  sat")
    assert alignment.words == ("The", "cat", "sat")
    assert [alignment.text[a:b] for a, b in alignment.spans if alignment.text[a:b].strip()] == ["The", "cat", "sat"]
    spaces = [
        token
        for token, span in zip(alignment.tokens, alignment.spans, strict=True)
        if alignment.text[slice(*span)].isspace()
    ]
    assert spaces == ["Ġ"]
    assert alignment.words_of_token[alignment.tokens.index("Ġ")] == ()


@pytest.mark.parametrize("kind", KINDS)
def test_align_contractions_are_one_word_and_marks_separate(kind: str) -> None:
    alignment = load_tokenizer(kind).align("It didn't, no.", add_special_tokens=False)
    assert alignment.words == ("It", "didn't", ",", "no", ".")
    assert alignment.word_spans == ((0, 2), (3, 9), (9, 10), (11, 13), (13, 14))
    pieces = dict(words_with_tokens(alignment))
    assert "".join(pieces["didn't"]) == "didn't"
    assert len(pieces["didn't"]) >= 2
    assert pieces[","] == [","]


def test_align_split_words_keep_their_tokens() -> None:
    alignment = load_tokenizer("minilm").align("Antidisestablishmentarianism wins")
    assert alignment.tokens[0] == "[CLS]"
    assert alignment.tokens[-1] == "[SEP]"
    assert alignment.words_of_token[0] == alignment.words_of_token[-1] == ()
    assert alignment.spans[0] == alignment.spans[-1] == (0, 0)
    first, second = alignment.tokens_of_word
    assert len(first) > 3
    assert (
        alignment.text[alignment.spans[first[0]][0] : alignment.spans[first[-1]][1]] == "Antidisestablishmentarianism"
    )
    assert [alignment.tokens[i] for i in second] == ["wins"]


def test_align_multi_token_emoji_is_one_word() -> None:
    alignment = load_tokenizer("smollm2").align("so 🦜 flew")
    assert alignment.words == ("so", "🦜", "flew")
    assert len(alignment.tokens_of_word[1]) > 1
    assert all(alignment.text[slice(*alignment.spans[i])] == "🦜" for i in alignment.tokens_of_word[1])
    assert alignment.tokens_of_word[2] == (len(alignment.tokens) - 1,)


@pytest.mark.parametrize("kind", KINDS)
def test_align_uses_given_words(kind: str) -> None:
    text = "We don't know New York."
    alignment = load_tokenizer(kind).align(text, words=["We", "do", "n't", "know", "New York", "."])
    assert alignment.words == ("We", "do", "n't", "know", "New York", ".")
    pieces = dict(words_with_tokens(alignment))
    assert pieces["do"] == ["don"]  # the token belongs to both words
    assert "".join(pieces["n't"]) == "don't"
    assert pieces["New York"] == ["New", "York"]
    with pytest.raises(hw.HeadwiseError, match=r"'lost' is not in the text after character 2"):
        load_tokenizer(kind).align(text, words=["We", "lost"])
    with pytest.raises(hw.HeadwiseError, match="not in the text after"):
        load_tokenizer(kind).align(text, words=["know", "We"])
    with pytest.raises(hw.HeadwiseError, match="not in the text"):
        load_tokenizer(kind).align(text, words=[""])


def test_align_subset_of_words() -> None:
    alignment = load_tokenizer("minilm").align("one two three", words=["two"], add_special_tokens=False)
    assert alignment.words_of_token == ((), (0,), ())
    assert alignment.tokens_of_word == ((1,),)


def test_align_token_belongs_to_every_word_it_covers() -> None:
    """SmolLM2 has one token for a comma and the quote after it."""
    alignment = load_tokenizer("smollm2").align('"Go," she said.', add_special_tokens=False)
    assert alignment.words == ('"', "Go", ",", '"', "she", "said", ".")
    assert [alignment.text[slice(*span)] for span in alignment.spans] == ['"', "Go", ',"', "she", "said", "."]
    assert alignment.words_of_token == ((0,), (1,), (2, 3), (4,), (5,), (6,))
    assert alignment.tokens_of_word == ((0,), (1,), (2,), (2,), (3,), (4,), (5,))


@pytest.mark.parametrize("kind", KINDS)
def test_align_every_probe_set_word_has_a_token(kind: str) -> None:
    for document in probe_set():
        alignment = load_tokenizer(kind).align(document.text, document.words)
        assert all(alignment.tokens_of_word), document.text


@pytest.mark.skipif(not DATA.is_dir(), reason="no data at $HEADWISE_DATA; docs/text.md says where to get it")
@pytest.mark.parametrize("kind", KINDS)
def test_align_every_treebank_arc_has_tokens(kind: str) -> None:
    arcs = 0
    for path in sorted(DATA.glob("ud-english-ewt/*.conllu")):
        for document in read_documents(path):
            tokens_of_word = load_tokenizer(kind).align(document.text, document.words).tokens_of_word
            assert all(tokens_of_word[arc.source] and tokens_of_word[arc.target] for arc in document.relations), (
                document.text
            )
            arcs += len(document.relations)
    assert arcs == 46163  # by `awk '$1 ~ /^[0-9]+$/ && $7 != 0'` over both files


@pytest.mark.parametrize("kind", KINDS)
def test_align_empty_text_has_no_words(kind: str) -> None:
    for text in ("", "  \n"):
        alignment = load_tokenizer(kind).align(text)
        assert alignment.words == ()
        assert not any(alignment.words_of_token)


def assert_alignment_is_valid(kind: str, text: str) -> None:
    """Check the properties of every alignment."""
    alignment = load_tokenizer(kind).align(text)
    assert list(alignment.ids) == load_tokenizer(kind).encode(text)
    assert len(alignment.ids) == len(alignment.tokens) == len(alignment.spans) == len(alignment.words_of_token)
    owner = {position: n for n, span in enumerate(alignment.word_spans) for position in range(*span)}
    assert set(owner) == {position for position, character in enumerate(text) if not character.isspace()}
    for span, words in zip(alignment.spans, alignment.words_of_token, strict=True):
        visible = [position for position in range(*span) if not text[position].isspace()]
        assert list(words) == sorted({owner[position] for position in visible})
    for token_indices in alignment.tokens_of_word:
        assert list(token_indices) == list(range(token_indices[0], token_indices[-1] + 1)) if token_indices else True
    first_words = [words[0] for words in alignment.words_of_token if words]
    assert first_words == sorted(first_words)


@pytest.mark.parametrize("kind", KINDS)
def test_alignment_is_valid_for_sentences(kind: str) -> None:
    for text in SENTENCES:
        assert_alignment_is_valid(kind, text)
        assert_alignment_is_valid(kind, f"  {text}\n\n{text} ")


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(st.sampled_from("abcXYZ0129 .,'’-_!?\n\téñ中文🦜👩\u200d\u0301ßﬁ"), max_size=40))
@settings(max_examples=150, deadline=None)
def test_alignment_is_valid_for_random_texts(kind: str, text: str) -> None:
    assert_alignment_is_valid(kind, text)
