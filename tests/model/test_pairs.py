"""An encoder-decoder writes what belongs to a text: the text is its source, and writing starts from the end token."""

from typing import Any

import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.text import Tokenizer
from headwise.text.build_tokenizers import character_tokenizer
from tests.contract.layers import MODELS, make_lively_model, token_ids
from tests.model.test_generate import TOKENS, by_hand

LETTERS = character_tokenizer("abcdefghijklmn")  # 14, one for all others, and an end: 16 of 17
PIECES = Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijkl"])
READ = ["bad", "k", "face", "a", "deaf"]


def translating(tokenizer: Tokenizer, seed: int = 1) -> Transformer:
    model = make_lively_model(MODELS["encoder-decoder"], seed)
    assert len(tokenizer) <= model.spec.vocab
    model.tokenizer = tokenizer
    return model


def answer(model: Transformer, source: list[int], start: int, tokens: int = TOKENS, **options: Any) -> list[int]:
    """What is written behind the start token, its end included, by full passes."""
    made = by_hand(model, [start], tokens, source=torch.tensor([source]), **options)[1:]
    return made[: made.index(start) + 1] if start in made else made


@pytest.mark.parametrize("seed", [1, 3, 10])
def test_a_text_is_what_an_encoder_decoder_reads(seed: int) -> None:
    model, end = translating(LETTERS, seed), LETTERS.eos
    assert end is not None
    assert model.start == end
    want = [answer(model, [*LETTERS.encode(text), end], end) for text in READ]
    texts = [LETTERS.decode(ids) for ids in want]
    assert len(set(texts)) > 2, "what is written depends on what is read"
    assert [model.generate(text, TOKENS) for text in READ] == texts
    assert model.generate(READ, TOKENS) == model.generate(tuple(READ), TOKENS) == texts
    assert model.generate(READ[0], TOKENS, cache=model.cache("fixed")) == texts[0]
    assert [int(step[0]) for step in model.stream(READ[0], TOKENS)] == want[0]
    by_ids = model.generate([end], TOKENS, source=torch.tensor([[*LETTERS.encode(READ[0]), end]]), stop=end)
    assert by_ids == [end, *want[0]]


def test_what_the_tokenizer_puts_around_a_text_is_read_too() -> None:
    model = translating(PIECES)
    cls, sep = 2, 3
    assert model.start == sep
    for text in ("b a d", "k", "f a c e"):
        ids = [cls, *PIECES.encode(text, special=False), sep]
        assert model.generate(text, TOKENS) == PIECES.decode(answer(model, ids, sep))


def test_an_encoder_decoder_stops_where_it_is_told() -> None:
    model, end = translating(LETTERS), LETTERS.eos
    assert end is not None
    source = [*LETTERS.encode("bad"), end]
    whole = by_hand(model, [end], TOKENS, source=torch.tensor([source]))[1:]
    assert [int(step[0]) for step in model.stream("bad", TOKENS, stop=[])] == whole
    first = whole[2]
    assert [int(step[0]) for step in model.stream("bad", TOKENS, stop=first)] == whole[: whole.index(first) + 1]


def test_with_another_source_a_text_is_where_writing_goes_on() -> None:
    model, source = translating(LETTERS), token_ids(1, 7, seed=5)
    want = by_hand(model, LETTERS.encode("bad"), 5, source=source)
    assert model.generate("bad", 5, source=source, stop=[]) == LETTERS.decode(want)


def test_without_cross_heads_nothing_is_read() -> None:
    model = translating(LETTERS)
    assert len({model.generate(text, TOKENS, gates={"cross.0.*,cross.1.*": 0.0}) for text in READ}) == 1
    assert len({model.generate(text, TOKENS) for text in READ}) > 1


def test_writing_starts_from_the_end_token() -> None:
    model = translating(LETTERS)
    for special, start in (({"eos": 0, "sep": 5}, 0), ({"sep": 5, "bos": 3}, 5), ({"eos": 7, "bos": 3}, 7)):
        model.tokenizer = Tokenizer(LETTERS.backend, special)
        assert model.start == start
    model.tokenizer = Tokenizer(LETTERS.backend, {"bos": 3})
    for act in (lambda: model.start, lambda: model.generate("bad", 3)):
        with pytest.raises(
            HeadwiseError, match="writing starts from the end token, and the model's tokenizer has none"
        ):
            act()
    model.tokenizer = None
    with pytest.raises(HeadwiseError, match="this model has no tokenizer, so it takes token ids"):
        model.generate("bad", 3)
