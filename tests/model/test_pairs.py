"""An encoder-decoder reads a text as its source and generates from the end-of-text token."""

from typing import Any

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import character_tokenizer
from tests.contract.layers import MODELS, make_varied_model, token_ids
from tests.model.test_generate import NEW_TOKENS, greedy_without_cache

LETTERS = character_tokenizer("abcdefghijklmn")  # 14 letters, one token for all others, and an end token: 16 of 17
PIECES = Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijkl"])
SOURCES = ["bad", "k", "face", "a", "deaf"]


def make_translator(tokenizer: Tokenizer, seed: int = 1) -> Transformer:
    model = make_varied_model(MODELS["encoder-decoder"], seed)
    assert len(tokenizer) <= model.spec.vocab
    model.tokenizer = tokenizer
    return model


def expected_answer(
    model: Transformer, source: list[int], start: int, tokens: int = NEW_TOKENS, **options: Any
) -> list[int]:
    """Return the tokens generated after the start token, including the end token, by full forward passes."""
    generated = greedy_without_cache(model, [start], tokens, source=torch.tensor([source]), **options)[1:]
    return generated[: generated.index(start) + 1] if start in generated else generated


@pytest.mark.parametrize("seed", [1, 3, 10])
def test_generate_encoder_decoder_text_is_source(seed: int) -> None:
    model, end = make_translator(LETTERS, seed), LETTERS.eos
    assert end is not None
    assert model.decoder_start_token == end
    want = [expected_answer(model, [*LETTERS.encode(text), end], end) for text in SOURCES]
    texts = [LETTERS.decode(ids) for ids in want]
    assert len(set(texts)) > 2, "what is written depends on what is read"
    assert [model.generate(text, NEW_TOKENS) for text in SOURCES] == texts
    assert model.generate(SOURCES, NEW_TOKENS) == model.generate(tuple(SOURCES), NEW_TOKENS) == texts
    assert model.generate(SOURCES[0], NEW_TOKENS, cache=model.cache("static")) == texts[0]
    assert [int(step[0]) for step in model.stream(SOURCES[0], NEW_TOKENS)] == want[0]
    by_ids = model.generate([end], NEW_TOKENS, source=torch.tensor([[*LETTERS.encode(SOURCES[0]), end]]), stop=end)
    assert by_ids == [end, *want[0]]


def test_generate_encoder_decoder_reads_tokenizer_template() -> None:
    model = make_translator(PIECES)
    cls, sep = 2, 3
    assert model.decoder_start_token == sep
    for text in ("b a d", "k", "f a c e"):
        ids = [cls, *PIECES.encode(text, add_special_tokens=False), sep]
        assert model.generate(text, NEW_TOKENS) == PIECES.decode(expected_answer(model, ids, sep))


def test_stream_encoder_decoder_ends_at_stop() -> None:
    model, end = make_translator(LETTERS), LETTERS.eos
    assert end is not None
    source = [*LETTERS.encode("bad"), end]
    full = greedy_without_cache(model, [end], NEW_TOKENS, source=torch.tensor([source]))[1:]
    assert [int(step[0]) for step in model.stream("bad", NEW_TOKENS, stop=[])] == full
    first = full[2]
    assert [int(step[0]) for step in model.stream("bad", NEW_TOKENS, stop=first)] == full[: full.index(first) + 1]


def test_generate_explicit_source_continues_text() -> None:
    model, source = make_translator(LETTERS), token_ids(1, 7, seed=5)
    want = greedy_without_cache(model, LETTERS.encode("bad"), 5, source=source)
    assert model.generate("bad", 5, source=source, stop=[]) == LETTERS.decode(want)


def test_generate_silenced_cross_heads_ignores_source() -> None:
    model = make_translator(LETTERS)
    assert len({model.generate(text, NEW_TOKENS, gates={"cross.0.*,cross.1.*": 0.0}) for text in SOURCES}) == 1
    assert len({model.generate(text, NEW_TOKENS) for text in SOURCES}) > 1


def test_start_token_is_end_token_or_raises() -> None:
    model = make_translator(LETTERS)
    for special, start in (({"eos": 0, "sep": 5}, 0), ({"sep": 5, "bos": 3}, 5), ({"eos": 7, "bos": 3}, 7)):
        model.tokenizer = Tokenizer(LETTERS.backend, special)
        assert model.decoder_start_token == start
    model.tokenizer = Tokenizer(LETTERS.backend, {"bos": 3})
    for act in (lambda: model.decoder_start_token, lambda: model.generate("bad", 3)):
        with pytest.raises(HeadwiseError, match="end-of-text or separator token"):
            act()
    model.tokenizer = None
    with pytest.raises(HeadwiseError, match="has no tokenizer"):
        model.generate("bad", 3)
