"""Tokenizers: WordPiece against transformers, tokenizer.json, and the three kinds of GGUF tokenizers."""

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
from headwise.text.gguf_tokenizer import tokenizer_from_gguf
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


def test_tokenizer_load_vocabulary_splits_at_line_feeds(tmp_path: Path) -> None:
    """Other Unicode line ends may be tokens. With splitlines() all later ids would be too high by one."""
    odd = ["\u2028", "\x85", "\x0b", "\x0c", "\x1c", "\u2029", "", "a\u2028b"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *odd, "head", "##s"]
    for end, last in (("\n", ""), ("\n", "\n"), ("\r\n", "\r\n")):
        (tmp_path / "vocab.txt").write_bytes((end.join(pieces) + last).encode())
        tokenizer = hw.Tokenizer.load(tmp_path)
        hf_tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
        assert tokenizer.encode("heads") == hf_tokenizer("heads").input_ids == [2, 13, 14, 3]
        assert len(tokenizer) == len(pieces)


@pytest.mark.parametrize("lower", [True, False])
def test_wordpiece_equals_transformers(lower: bool, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary()) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    tokenizer = hw.Tokenizer.load(tmp_path)
    table = {piece: i for i, piece in enumerate(vocabulary())}
    hf_tokenizer = transformers.BertTokenizer(table, do_lower_case=lower)
    assert len(tokenizer) == len(hf_tokenizer) == 30522
    for text in TEXTS:
        assert tokenizer.encode(text) == hf_tokenizer(text).input_ids, text
        assert (
            tokenizer.encode(text, add_special_tokens=False) == hf_tokenizer(text, add_special_tokens=False).input_ids
        )
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == hf_tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        ), text
    assert [tokenizer.token(i) for i in (0, 100, 101, 2000)] == hf_tokenizer.convert_ids_to_tokens([0, 100, 101, 2000])


def test_wordpiece_equals_tokenizer_json() -> None:
    from_json, from_vocab = hw.Tokenizer.load(minilm_folder()), hw.Tokenizer.load(minilm_folder() / "vocab.txt")
    assert from_json.special == from_vocab.special
    for text in TEXTS:
        assert from_json.encode(text) == from_vocab.encode(text)


def test_tokenizer_special_ids() -> None:
    tokenizer = hw.Tokenizer.from_wordpiece(vocabulary())
    assert (tokenizer.pad, tokenizer.unk, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 100, 101, 102, 103)
    assert tokenizer.bos is None
    assert tokenizer.eos is None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tokenizer.nothing
    with pytest.raises(hw.HeadwiseError, match="Got 30522"):
        tokenizer.token(30522)


def test_tokenizer_load_invalid_vocabulary_raises(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"lacks \[CLS\], \[SEP\]"):
        hw.Tokenizer.from_wordpiece(["[UNK]", "a"])
    with pytest.raises(hw.HeadwiseError, match=r"needs tokenizer\.json or vocab\.txt"):
        hw.Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(hw.HeadwiseError, match="it is not a tokenizer"):
        hw.Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_bytes(b"[UNK]\n[CLS]\n[SEP]\n\xff\xfe")
    with pytest.raises(hw.HeadwiseError):
        hw.Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "null", '"x"', "{"])
def test_tokenizer_load_invalid_config_raises(text: str, tmp_path: Path) -> None:
    hw.Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]"]).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(hw.HeadwiseError):
        hw.Tokenizer.load(tmp_path)


def test_tokenizer_load_special_tokens_in_every_format(tmp_path: Path) -> None:
    hw.Tokenizer.from_wordpiece(["[UNK]", "[CLS]", "[SEP]", "<s>", "</s>"]).save(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "</s>", "sep_token": "[SEP]"}))
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "mask_token": "?",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = hw.Tokenizer.load(tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.mask, tokenizer.sep) == (3, 4, None, None, 2)


def test_tokenizer_load_ignores_padding_and_truncation(tmp_path: Path) -> None:
    tokenizer = hw.Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"])
    tokenizer.backend.enable_padding(length=20)
    tokenizer.backend.enable_truncation(3)
    tokenizer.save(tmp_path)
    assert hw.Tokenizer.load(tmp_path).encode("a a a a") == [2, 4, 4, 4, 4, 3]


def test_tokenizer_load_saved_by_transformers(tmp_path: Path) -> None:
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    hf_tokenizer.save_pretrained(tmp_path)
    tokenizer = hw.Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == hf_tokenizer(text).input_ids
    assert (tokenizer.cls, tokenizer.mask) == (hf_tokenizer.cls_token_id, hf_tokenizer.mask_token_id)


# GGUF: byte-level, as GPT-2.


def byte_level_fields(pre: str | None = None, **extra_fields: Any) -> dict[str, Any]:
    """Return fields with all bytes and a few merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["Ġ h", "e a", "ea d", "Ġh ead", "1 2", "12 3", "123 4", "Ġ 1", "' s"]
    tokens = ["<|end|>", *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    fields |= {"tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1), "tokenizer.ggml.eos_token_id": 0}
    if pre is not None:
        fields["tokenizer.ggml.pre"] = pre
    return fields | {f"tokenizer.ggml.{name}": value for name, value in extra_fields.items()}


def tokens_of(tokenizer: hw.Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(id) for id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        (
            "default",
            ["Ġhead", "'", "s", "Ġ", "123", "4", "<|end|>"],
        ),  # punctuation and groups of three digits are split
        ("gpt-2", ["Ġhead", "'s", "Ġ", "1234", "<|end|>"]),
        ("smollm", ["Ġhead", "'s", "Ġ", "1", "2", "3", "4", "<|end|>"]),
        ("llama-bpe", ["Ġhead", "'s", "Ġ", "123", "4", "<|end|>"]),
        ("llama3", ["Ġhead", "'s", "Ġ", "123", "4", "<|end|>"]),
        ("qwen2", ["Ġhead", "'s", "Ġ", "1", "2", "3", "4", "<|end|>"]),
    ],
)
def test_gguf_byte_level_splits_text_as_pretokenizer_says(pre: str, expected: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(byte_level_fields(pre, add_bos_token=False))
    assert tokens_of(tokenizer, " head's 1234<|end|>") == expected


@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_gguf_byte_level_round_trips_any_text(text: str) -> None:
    for pre in ("gpt-2", "smollm", "llama3"):
        tokenizer = _byte_level_of(pre)
        assert tokenizer.decode(tokenizer.encode(text), keep_special_tokens=True) == text


@cache
def _byte_level_of(pre: str) -> hw.Tokenizer:
    return tokenizer_from_gguf(byte_level_fields(pre, add_bos_token=False))


def test_gguf_byte_level_adds_bos_if_requested() -> None:
    assert tokenizer_from_gguf(byte_level_fields("gpt-2", add_bos_token=False)).encode("") == []
    with pytest.raises(hw.HeadwiseError, match="adds a start token but does not define it"):
        tokenizer_from_gguf(byte_level_fields("gpt-2", add_bos_token=True))
    tokenizer = tokenizer_from_gguf(byte_level_fields("gpt-2", add_bos_token=True, bos_token_id=0))
    assert tokenizer.encode("h")[0] == tokenizer.bos == 0
    assert 0 not in tokenizer.encode("h", add_special_tokens=False)


# GGUF: SentencePiece, as Llama.

PIECE_SCORES = {
    "▁": -1.0, "a": -2.0, "b": -3.0, "n": -4.0, "an": -0.1, "ban": -0.25, "ana": -0.2, "▁b": -0.3, "▁ban": -0.15,
    "▁▁": -0.5, "▁a": -0.4, "na": -0.05, "nan": -0.6, "aa": -0.7, "▁banana": -0.01, "c": -5.0,
}  # fmt: skip


def sentencepiece_fields(scores: dict[str, float] = PIECE_SCORES, **extra_fields: Any) -> dict[str, Any]:
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
    return fields | {f"tokenizer.ggml.{name}": value for name, value in extra_fields.items()}


def merge_pieces(text: str, scores: dict[str, float] = PIECE_SCORES, prefix: bool = True) -> list[str]:
    """Reference of SentencePiece: merge the pair with the best score first, from the left; use bytes for unknown pieces."""
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
def test_gguf_sentencepiece_merges_best_pair_first(text: str) -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_fields())
    assert tokens_of(tokenizer, text) == ["<s>", *merge_pieces(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gguf_sentencepiece_matches_hand_count() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_fields())
    # ▁ b a n: first "an" (−0.1), then "▁b" (−0.3), then "▁b" + "an" = "▁ban" (−0.15).
    assert tokens_of(tokenizer, "ban") == ["<s>", "▁ban"]
    assert tokens_of(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokens_of(tokenizer, "</s>") == ["<s>", "</s>"]
    plain = tokenizer_from_gguf(sentencepiece_fields(add_space_prefix=False, add_bos_token=False))
    assert tokens_of(plain, "ban") == merge_pieces("ban", prefix=False)
    assert plain.decode(plain.encode(" ban")) == " ban"


def test_gguf_sentencepiece_equals_reference_on_random_texts() -> None:
    tokenizer, rng = tokenizer_from_gguf(sentencepiece_fields()), random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("aabbnnn c") for _ in range(rng.randrange(1, 14)))
        assert tokens_of(tokenizer, text) == ["<s>", *merge_pieces(text)], text


def test_gguf_sentencepiece_equals_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    fields = sentencepiece_fields()
    names = {"model": "tokenizer_type", "unknown_token_id": "unk_token_id", "padding_token_id": "pad_token_id"}
    hf_fields = {names.get(key.split(".")[-1], key.split(".")[-1]): value for key, value in fields.items()}
    backend, _ = mapping.convert_gguf_tokenizer("llama", hf_fields)
    tokenizer = tokenizer_from_gguf(fields)
    for text in ("ban", "banana", "a b", "nanana ban", "abc", "a😀b é", "anna"):
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids, (
            text
        )


# GGUF: WordPiece, as BERT.


def bert_fields(vocab: tuple[str, ...]) -> dict[str, Any]:
    """Return fields as llama.cpp's converter writes them: ▁ before word starts, no mark for continuations."""

    def gguf_spelling(piece: str) -> str:
        if piece.startswith("[") and piece.endswith("]"):
            return piece
        return piece[2:] if piece.startswith("##") else f"▁{piece}"

    names = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]"}
    fields: dict[str, Any] = {f"tokenizer.ggml.{role}_token_id": vocab.index(name) for role, name in names.items()}
    tokens = [gguf_spelling(piece) for piece in vocab]
    return fields | {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens}


def test_gguf_wordpiece_encodes_text() -> None:
    small = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "head", "##s", "attend", "##ing", "s")
    tokenizer = tokenizer_from_gguf(bert_fields(small))
    assert tokenizer.encode("Heads attending s") == [2, 5, 6, 7, 8, 9, 3]
    assert tokenizer.mask == 4


def test_gguf_wordpiece_equals_vocabulary_file() -> None:
    tokenizer, want = tokenizer_from_gguf(bert_fields(vocabulary())), hw.Tokenizer.from_wordpiece(vocabulary())
    assert tokenizer.special == want.special
    for text in (*TEXTS, "a list [1] of [things]", "x[i]", "[[", "]"):
        assert tokenizer.encode(text) == want.encode(text), text


# Errors.


@pytest.mark.parametrize("kind", ["plamo2", "rwkv", "no_vocab", None])
def test_gguf_unknown_tokenizer_raises(kind: str | None) -> None:
    with pytest.raises(hw.HeadwiseError, match=rf"Got {kind!r}\. Supported are gpt2, llama, t5, bert"):
        tokenizer_from_gguf({"tokenizer.ggml.model": kind})


def test_gguf_missing_tokens_raise() -> None:
    with pytest.raises(hw.HeadwiseError, match="a tokenizer without tokens"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "gpt2"})


def test_gguf_missing_scores_raise() -> None:
    fields = sentencepiece_fields()
    del fields["tokenizer.ggml.scores"]
    with pytest.raises(hw.HeadwiseError):
        tokenizer_from_gguf(fields)


def test_gguf_merges_of_missing_tokens_raise() -> None:
    with pytest.raises(hw.HeadwiseError):
        tokenizer_from_gguf(byte_level_fields("gpt-2", merges=["Ġ nothing"]))


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level", "sentencepiece", "bert", "smollm2"])
def test_tokenizer_save_and_load_round_trip(kind: str, tmp_path: Path) -> None:
    tokenizer: Any = {
        "wordpiece": lambda: hw.Tokenizer.from_wordpiece(vocabulary()),
        "byte-level": lambda: tokenizer_from_gguf(byte_level_fields("llama3", add_bos_token=True, bos_token_id=0)),
        "sentencepiece": lambda: tokenizer_from_gguf(sentencepiece_fields()),
        "bert": lambda: tokenizer_from_gguf(bert_fields(vocabulary())),
        "smollm2": lambda: hw.load("smollm2", check=False).tokenizer,
    }[kind]()
    tokenizer.save(tmp_path)
    back = hw.Tokenizer.load(tmp_path)
    assert back.special == tokenizer.special
    assert len(back) == len(tokenizer)
    for text in TEXTS:
        assert back.encode(text) == tokenizer.encode(text)
        assert back.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
        assert back.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
