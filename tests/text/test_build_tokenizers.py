"""Tokenizers made here read back what they wrote, and survive saving."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import bpe_tokenizer, byte_tokenizer, character_tokenizer, word_tokenizer

TEXTS = ["the cat sat on the mat .", "naïve café — 東京 🙂\n\ttabs  and  spaces"]
MADE = {
    "bytes": byte_tokenizer(),
    "characters": character_tokenizer("".join(TEXTS)),
    "words": word_tokenizer(["the", "cat", "sat", "on", "mat", "."]),
    "bpe": bpe_tokenizer(TEXTS * 20, size=300),
}


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_bytes_and_bpe_read_anything(text: str) -> None:
    for name in ("bytes", "bpe"):
        assert MADE[name].decode(MADE[name].encode(text)) == text
    assert MADE["bytes"].encode(text) == list(text.encode())


@pytest.mark.parametrize("name", ["bytes", "characters", "bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(name: str, text: str) -> None:
    assert MADE[name].decode(MADE[name].encode(text)) == text


def test_units_not_in_the_vocabulary_are_unknown() -> None:
    words = MADE["words"]
    assert words.encode("the dog .") == [0, words.unk, 5]
    assert MADE["characters"].encode("ø") == [MADE["characters"].unk]


@pytest.mark.parametrize("name", MADE)
def test_the_end_is_a_token_of_its_own(name: str) -> None:
    made = MADE[name]
    assert made.eos is not None
    assert made.token(made.eos) == "<end>"
    assert made.eos not in made.encode("the cat sat")


@pytest.mark.parametrize("name", MADE)
def test_saved_and_loaded_they_are_the_same(name: str, tmp_path: Path) -> None:
    MADE[name].save(tmp_path)
    back = Tokenizer.load(tmp_path)
    assert len(back) == len(MADE[name])
    assert back.special == MADE[name].special
    for text in TEXTS:
        assert back.encode(text) == MADE[name].encode(text)
        assert back.decode(back.encode(text)) == MADE[name].decode(MADE[name].encode(text))


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="the text is empty"):
        character_tokenizer("")
    with pytest.raises(HeadwiseError, match="each once"):
        word_tokenizer(["a", "a"])
    with pytest.raises(HeadwiseError, match="size must be 257 or more; got 100"):
        bpe_tokenizer(TEXTS, size=100)
