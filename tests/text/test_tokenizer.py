"""Tokenizers: WordPiece as transformers has it, tokenizer.json, and the three kinds a GGUF file may describe."""

import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import headwise as hw
from headwise.text.gguf import tokenizer_from_gguf
from tests.parity.real import minilm_folder
from tests.parity.sentences import SENTENCES

TEXTS = (
    *SENTENCES,
    "",
    " ",
    "\t\n  leading and trailing \n",
    "e\u0301 combined, é single, ﬁ ligature, İstanbul, ß, Å",
    "don't won't o'clock 'quoted' “curly” ‘single’",
    "a" * 250,
    "unaffable" * 12,
    "supercalifragilisticexpialidocious",
    "qwxzqwxzqwxz ☃ \u200b \u00ad \x07 \ufffd",
    "[CLS] [MASK] [SEP] [UNK] [mask] [",
    "中文字符 and ひらがな and 한국어",
    "C++ #hashtag @user $5.00 50% a/b\\c <tag> {x} ~ ^ `",
)


@cache
def vocabulary() -> tuple[str, ...]:
    return tuple((minilm_folder() / "vocab.txt").read_text(encoding="utf-8").splitlines())


# WordPiece.


def test_a_vocabulary_is_cut_at_line_feeds_alone(tmp_path: Path) -> None:
    """Other line ends of Unicode's may be pieces; at splitlines() every later id would be one too high."""
    odd = ["\u2028", "\x85", "\x0b", "\x0c", "\x1c", "\u2029", "", "a\u2028b"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *odd, "head", "##s"]
    for end, last in (("\n", ""), ("\n", "\n"), ("\r\n", "\r\n")):
        (tmp_path / "vocab.txt").write_bytes((end.join(pieces) + last).encode())
        ours = hw.Tokenizer.load(tmp_path)
        theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
        assert ours.encode("heads") == theirs("heads").input_ids == [2, 13, 14, 3]
        assert len(ours) == len(pieces)


@pytest.mark.parametrize("lower", [True, False])
def test_wordpiece_is_transformers_own(lower: bool, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary()) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    ours = hw.Tokenizer.load(tmp_path)
    table = {piece: i for i, piece in enumerate(vocabulary())}
    theirs = transformers.BertTokenizer(table, do_lower_case=lower)
    assert len(ours) == len(theirs) == 30522
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids, text
        assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False).input_ids
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), (
            text
        )
    assert [ours.token(i) for i in (0, 100, 101, 2000)] == theirs.convert_ids_to_tokens([0, 100, 101, 2000])


def test_wordpiece_is_that_of_the_bundles_own_file() -> None:
    from_json, from_vocab = hw.Tokenizer.load(minilm_folder()), hw.Tokenizer.load(minilm_folder() / "vocab.txt")
    assert from_json.special == from_vocab.special
    for text in TEXTS:
        assert from_json.encode(text) == from_vocab.encode(text)


def test_special_ids() -> None:
    ours = hw.Tokenizer.from_wordpiece(vocabulary())
    assert (ours.pad, ours.unk, ours.cls, ours.sep, ours.mask) == (0, 100, 101, 102, 103)
    assert ours.bos is None
    assert ours.eos is None
    with pytest.raises(AttributeError, match="a tokenizer has no 'nothing'"):
        ours.nothing
    with pytest.raises(hw.HeadwiseError, match="there is no token 30522; the vocabulary has 30522"):
        ours.token(30522)


def test_a_vocabulary_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"lacks \[CLS\], \[SEP\]"):
        hw.Tokenizer.from_wordpiece(["[UNK]", "a"])
    with pytest.raises(hw.HeadwiseError, match=r"needs tokenizer\.json or vocab\.txt"):
        hw.Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(hw.HeadwiseError, match="is not a tokenizer"):
        hw.Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_bytes(b"[UNK]\n[CLS]\n[SEP]\n\xff\xfe")
    with pytest.raises(hw.HeadwiseError):
        hw.Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "null", '"x"', "{"])
def test_a_configuration_beside_it_that_is_none(text: str, tmp_path: Path) -> None:
    hw.Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]"]).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(hw.HeadwiseError):
        hw.Tokenizer.load(tmp_path)


def test_special_tokens_in_every_spelling_of_the_configuration(tmp_path: Path) -> None:
    hw.Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "<s>", "</s>"]).save(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "</s>", "sep_token": "[SEP]"}))
    told = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None, "mask_token": "?"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    ours = hw.Tokenizer.load(tmp_path)
    assert (ours.bos, ours.eos, ours.pad, ours.mask, ours.sep) == (3, 4, None, None, 2)


def test_padding_and_cutting_in_a_file_are_not_taken_over(tmp_path: Path) -> None:
    made = hw.Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"])
    made.backend.enable_padding(length=20)
    made.backend.enable_truncation(3)
    made.save(tmp_path)
    assert hw.Tokenizer.load(tmp_path).encode("a a a a") == [2, 4, 4, 4, 4, 3]


def test_a_cut_tokenizer_of_transformers_is_read(tmp_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    theirs.save_pretrained(tmp_path)
    ours = hw.Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids
    assert (ours.cls, ours.mask) == (theirs.cls_token_id, theirs.mask_token_id)


# GGUF: byte-level, as GPT-2.


def byte_level(pre: str | None = None, **more: Any) -> dict[str, Any]:
    """Every byte, and a few merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["Ġ h", "e a", "ea d", "Ġh ead", "1 2", "12 3", "123 4", "Ġ 1", "' s"]
    tokens = ["<|end|>", *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    fields |= {"tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1), "tokenizer.ggml.eos_token_id": 0}
    if pre is not None:
        fields["tokenizer.ggml.pre"] = pre
    return fields | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def pieces(tokenizer: hw.Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(id) for id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("default", ["Ġhead", "'", "s", "Ġ", "123", "4", "<|end|>"]),  # marks and threes of digits stand apart
        ("gpt-2", ["Ġhead", "'s", "Ġ", "1234", "<|end|>"]),
        ("smollm", ["Ġhead", "'s", "Ġ", "1", "2", "3", "4", "<|end|>"]),
        ("llama-bpe", ["Ġhead", "'s", "Ġ", "123", "4", "<|end|>"]),
        ("llama3", ["Ġhead", "'s", "Ġ", "123", "4", "<|end|>"]),
        ("qwen2", ["Ġhead", "'s", "Ġ", "1", "2", "3", "4", "<|end|>"]),
    ],
)
def test_byte_level_cuts_text_as_the_file_says(pre: str, expected: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(byte_level(pre, add_bos_token=False))
    assert pieces(tokenizer, " head's 1234<|end|>") == expected


@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_byte_level_gives_every_text_back(text: str) -> None:
    for pre in ("gpt-2", "smollm", "llama3"):
        tokenizer = _byte_level_of(pre)
        assert tokenizer.decode(tokenizer.encode(text), special=True) == text


@cache
def _byte_level_of(pre: str) -> hw.Tokenizer:
    return tokenizer_from_gguf(byte_level(pre, add_bos_token=False))


def test_a_start_token_where_the_file_asks_for_one() -> None:
    assert tokenizer_from_gguf(byte_level("gpt-2", add_bos_token=False)).encode("") == []
    with pytest.raises(hw.HeadwiseError, match="asks for a start token but names none"):
        tokenizer_from_gguf(byte_level("gpt-2", add_bos_token=True))
    made = tokenizer_from_gguf(byte_level("gpt-2", add_bos_token=True, bos_token_id=0))
    assert made.encode("h")[0] == made.bos == 0
    assert 0 not in made.encode("h", special=False)


# GGUF: SentencePiece, as Llama.

PIECES = {
    "▁": -1.0, "a": -2.0, "b": -3.0, "n": -4.0, "an": -0.1, "ban": -0.25, "ana": -0.2, "▁b": -0.3, "▁ban": -0.15,
    "▁▁": -0.5, "▁a": -0.4, "na": -0.05, "nan": -0.6, "aa": -0.7, "▁banana": -0.01, "c": -5.0,
}  # fmt: skip


def sentencepiece(scores: dict[str, float] = PIECES, **more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scores]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(scores)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(scores.values()),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return fields | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def merged(text: str, scores: dict[str, float] = PIECES, prefix: bool = True) -> list[str]:
    """What SentencePiece does: of all neighbours that make a piece, the best first, from the left; bytes for the rest."""
    parts = list((("▁" if prefix else "") + text).replace(" ", "▁"))
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            break
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [p for part in parts for p in ([part] if part in scores else [f"<0x{b:02X}>" for b in part.encode()])]


@pytest.mark.parametrize(
    "text", ["ban", "banana", "a  b", " banan", "nanana ban", "abc", "a😀b é", "aaaa", "anna", "naan  nab"]
)
def test_sentencepiece_merges_the_best_pair_first(text: str) -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece())
    assert pieces(tokenizer, text) == ["<s>", *merged(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_by_hand() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece())
    # ▁ b a n → "an" is the best (−0.1), then ▁b (−0.3) and no ▁ban from ▁b + an? It is there: −0.15
    assert pieces(tokenizer, "ban") == ["<s>", "▁ban"]
    assert pieces(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert pieces(tokenizer, "</s>") == ["<s>", "</s>"]
    plain = tokenizer_from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert pieces(plain, "ban") == merged("ban", prefix=False)
    assert plain.decode(plain.encode(" ban")) == " ban"


def test_sentencepiece_on_random_texts() -> None:
    tokenizer, draws = tokenizer_from_gguf(sentencepiece()), random.Random(0)
    for _ in range(500):
        text = "".join(draws.choice("aabbnnn c") for _ in range(draws.randrange(1, 14)))
        assert pieces(tokenizer, text) == ["<s>", *merged(text)], text


def test_sentencepiece_as_transformers_converts_it() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    fields = sentencepiece()
    names = {"model": "tokenizer_type", "unknown_token_id": "unk_token_id", "padding_token_id": "pad_token_id"}
    told = {names.get(key.split(".")[-1], key.split(".")[-1]): value for key, value in fields.items()}
    backend, _ = mapping.convert_gguf_tokenizer("llama", told)
    ours = tokenizer_from_gguf(fields)
    for text in ("ban", "banana", "a b", "nanana ban", "abc", "a😀b é", "anna"):
        assert ours.encode(text, special=False) == backend.encode(text, add_special_tokens=False).ids, text


# GGUF: WordPiece, as BERT.


def bert_fields(vocab: tuple[str, ...]) -> dict[str, Any]:
    """As llama.cpp's converter spells it: ▁ before what begins a word, nothing before what goes on."""

    def spelled(piece: str) -> str:
        if piece.startswith("[") and piece.endswith("]"):
            return piece
        return piece[2:] if piece.startswith("##") else f"▁{piece}"

    names = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}
    fields: dict[str, Any] = {f"tokenizer.ggml.{role}_token_id": vocab.index(name) for role, name in names.items()}
    tokens = [spelled(piece) for piece in vocab]
    return fields | {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens}


def test_wordpiece_out_of_gguf() -> None:
    small = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "head", "##s", "attend", "##ing", "s")
    tokenizer = tokenizer_from_gguf(bert_fields(small))
    assert tokenizer.encode("Heads attending s") == [2, 5, 6, 7, 8, 9, 3]
    assert tokenizer.mask == 4


def test_wordpiece_out_of_gguf_is_the_same_as_from_its_vocabulary() -> None:
    ours, want = tokenizer_from_gguf(bert_fields(vocabulary())), hw.Tokenizer.from_wordpiece(vocabulary())
    assert ours.special == want.special
    for text in (*TEXTS, "a list [1] of [things]", "x[i]", "[[", "]"):
        assert ours.encode(text) == want.encode(text), text


# Others.


@pytest.mark.parametrize("kind", ["t5", "rwkv", "no_vocab", None])
def test_a_kind_nobody_knows(kind: str | None) -> None:
    with pytest.raises(hw.HeadwiseError, match=rf"{kind!r} tokenizer; those supported are gpt2, llama, bert"):
        tokenizer_from_gguf({"tokenizer.ggml.model": kind})


def test_fields_that_are_missing() -> None:
    with pytest.raises(hw.HeadwiseError, match="holds no tokens"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "gpt2"})


def test_scores_that_are_missing() -> None:
    fields = sentencepiece()
    del fields["tokenizer.ggml.scores"]
    with pytest.raises(hw.HeadwiseError):
        tokenizer_from_gguf(fields)


def test_merges_of_tokens_that_are_missing() -> None:
    with pytest.raises(hw.HeadwiseError):
        tokenizer_from_gguf(byte_level("gpt-2", merges=["Ġ nothing"]))


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level", "sentencepiece", "bert", "smollm2"])
def test_saved_and_loaded_it_reads_the_same(kind: str, tmp_path: Path) -> None:
    made: Any = {
        "wordpiece": lambda: hw.Tokenizer.from_wordpiece(vocabulary()),
        "byte-level": lambda: tokenizer_from_gguf(byte_level("llama3", add_bos_token=True, bos_token_id=0)),
        "sentencepiece": lambda: tokenizer_from_gguf(sentencepiece()),
        "bert": lambda: tokenizer_from_gguf(bert_fields(vocabulary())),
        "smollm2": lambda: hw.load("smollm2", check=False).tokenizer,
    }[kind]()
    made.save(tmp_path)
    back = hw.Tokenizer.load(tmp_path)
    assert back.special == made.special
    assert len(back) == len(made)
    for text in TEXTS:
        assert back.encode(text) == made.encode(text)
        assert back.encode(text, special=False) == made.encode(text, special=False)
        assert back.decode(made.encode(text)) == made.decode(made.encode(text))
