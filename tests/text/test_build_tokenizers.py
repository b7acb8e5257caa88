"""Built tokenizers decode the texts that they encode, also after saving and loading."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import bpe_tokenizer, byte_tokenizer, character_tokenizer, word_tokenizer

TEXTS = ["the cat sat on the mat .", "naïve café — 東京 🙂\n\ttabs  and  spaces"]
TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "characters": character_tokenizer("".join(TEXTS)),
    "words": word_tokenizer(["the", "cat", "sat", "on", "mat", "."]),
    "bpe": bpe_tokenizer(TEXTS * 20, vocab_size=300),
}


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_byte_and_bpe_tokenizers_round_trip_any_text(text: str) -> None:
    for name in ("bytes", "bpe"):
        assert TOKENIZERS[name].decode(TOKENIZERS[name].encode(text)) == text
    assert TOKENIZERS["bytes"].encode(text) == list(text.encode())


@pytest.mark.parametrize("name", ["bytes", "characters", "bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_tokenizers_round_trip_texts(name: str, text: str) -> None:
    assert TOKENIZERS[name].decode(TOKENIZERS[name].encode(text)) == text


def test_tokenizers_unknown_words_map_to_unk() -> None:
    words = TOKENIZERS["words"]
    assert words.encode("the dog .") == [0, words.unk, 5]
    assert TOKENIZERS["characters"].encode("ø") == [TOKENIZERS["characters"].unk]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_eos_is_separate_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.eos is not None
    assert tokenizer.token(tokenizer.eos) == "<end>"
    assert tokenizer.eos not in tokenizer.encode("the cat sat")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_save_and_load_round_trip(name: str, tmp_path: Path) -> None:
    TOKENIZERS[name].save(tmp_path)
    back = Tokenizer.load(tmp_path)
    assert len(back) == len(TOKENIZERS[name])
    assert back.special == TOKENIZERS[name].special
    for text in TEXTS:
        assert back.encode(text) == TOKENIZERS[name].encode(text)
        assert back.decode(back.encode(text)) == TOKENIZERS[name].decode(TOKENIZERS[name].encode(text))


def test_tokenizer_builders_invalid_input_raises() -> None:
    with pytest.raises(HeadwiseError, match="the text is empty"):
        character_tokenizer("")
    with pytest.raises(HeadwiseError, match="no word twice"):
        word_tokenizer(["a", "a"])
    with pytest.raises(HeadwiseError, match="Use at least 257"):
        bpe_tokenizer(TEXTS, vocab_size=100)
