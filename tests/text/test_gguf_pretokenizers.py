"""How GGUF's byte-level tokenizers cut text: against llama.cpp itself, and every name it knows read or refused."""

import json
from functools import cache
from typing import Any

import pytest

import headwise as hw
from headwise.text.gguf import tokenizer_from_gguf
from headwise.text.gguf_pretokenizers import CUTS, UNREAD
from tests.text.llama_cpp import FILE, fields

# Every name llama.cpp's llama-vocab.cpp tells apart.
NAMES = [
    "default",
    "minicpm5",
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "spark2_5",
    "youtu",
    "falcon",
    "mpt",
    "starcoder",
    "gpt-2",
    "phi-2",
    "jina-es",
    "jina-de",
    "gigachat",
    "jina-v2-es",
    "jina-v2-de",
    "a.x-4.0",
    "mellum",
    "modern-bert",
    "jais-2",
    "gemma4",
    "granite-embed-multi-311m",
    "sarvam-moe",
    "jina-v1-en",
    "jina-v2-code",
    "roberta-bpe",
    "whitespace",
    "refact",
    "command-r",
    "qwen2",
    "deepseek-r1-qwen",
    "kormo",
    "f2llmv2",
    "qwen35",
    "stablelm2",
    "olmo",
    "dbrx",
    "smaug-bpe",
    "poro-chat",
    "glm4",
    "chatglm-bpe",
    "viking",
    "jais",
    "tekken",
    "smollm",
    "codeshell",
    "bloom",
    "gpt3-finnish",
    "exaone",
    "exaone4",
    "exaone-moe",
    "chameleon",
    "minerva-7b",
    "megrez",
    "gpt-4o",
    "llama4",
    "kanana2",
    "talkie",
    "granite-embed-multi-97m",
    "tiny_aya",
    "cohere2moe",
    "superbpe",
    "trillion",
    "granite-docling",
    "bailingmoe",
    "bailingmoe2",
    "llada-moe",
    "seed-coder",
    "hunyuan",
    "hunyuan-dense",
    "hy_v4",
    "joyai-llm",
    "kimi-k2",
    "ufakzeka",
    "grok-2",
    "afmoe",
    "laguna",
    "minimax-m2",
    "solar-open",
    "mellum2",
]


@cache
def told() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


@cache
def made(pre: str, **more: Any) -> hw.Tokenizer:
    changed = {f"tokenizer.ggml.{name}": value for name, value in more.items()}
    return tokenizer_from_gguf(fields(pre, told()["tokens"], told()["merges"]) | changed)


def test_every_name_is_read_or_refused() -> None:
    assert sorted([*CUTS, *UNREAD]) == sorted(NAMES)
    assert {CUTS[name] for name in told()["ids"]} == set(CUTS.values())  # each is compared below


@pytest.mark.parametrize("pre", sorted(CUTS))
def test_ids_are_llama_cpps(pre: str) -> None:
    like = next(name for name in told()["ids"] if CUTS[name] == CUTS[pre])
    cased = any(r"\p{Lu}" in pattern for pattern in CUTS[pre].patterns)
    for text, ids in zip(told()["texts"], told()["ids"][like], strict=True):
        if not (cased and "\u0301" in text):  # see below
            assert made(pre).encode(text) == ids, text


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "tekken"])
def test_llama_3s_start_token_and_whole_pieces(pre: str) -> None:
    """By default a start token; and a piece that is in the vocabulary is one token, though no merge makes it."""
    whole = told()["tokens"].index("Ġqzx")
    assert made(pre).encode(" qzx") == [0, whole]
    assert made(pre, add_bos_token=False).encode(" qzx") == [whole]
    assert made("gpt-2").encode(" qzx") == [told()["tokens"].index(token) for token in "Ġqzx"]


def test_an_end_token_where_the_file_asks_for_one() -> None:
    assert made("gpt-2", add_eos_token=True).encode("1") == [told()["tokens"].index("1"), 1]
    assert made("llama3", add_eos_token=True).encode("1") == [0, told()["tokens"].index("1"), 1]
    with pytest.raises(hw.HeadwiseError, match="asks for an end token but names none"):
        made("gpt-2", add_eos_token=True, eos_token_id=None)


def test_an_added_token_is_text() -> None:
    tool = told()["tokens"].index("<tool>")
    assert made("gpt-2").encode("<tool>") == [tool]
    assert made("gpt-2").decode([tool, 1]) == "<tool>"


def test_capitals_and_marks_follow_the_models_own_tokenizer() -> None:
    r"""Ω is a capital, \p{Lu}: it begins a new word. An accent, \p{M}, is part of its word. llama.cpp's pattern knows A-Z
    alone and no accents, so there the two differ."""
    cut = made("tekken", add_bos_token=False).backend.pre_tokenizer
    assert cut is not None
    assert [span for _, span in cut.pre_tokenize_str("qzxΩ")] == [(0, 3), (3, 4)]
    assert [span for _, span in cut.pre_tokenize_str("cafe\u0301s")] == [(0, 6)]


@pytest.mark.parametrize(
    ("pre", "said"),
    [
        (None, r"does not say how its tokenizer cuts text \(tokenizer\.ggml\.pre\); convert it again"),
        ("kimi-k2", r"the 'kimi-k2' way .*llama\.cpp knows, but Headwise does not read; use the model's folder"),
        ("mine", r"the 'mine' way .*which is not known; use the model's folder with its tokenizer\.json"),
    ],
)
def test_what_is_not_known_is_refused_by_name(pre: str | None, said: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=said):
        made(pre)  # pyright: ignore


def test_a_vocabulary_with_a_token_twice() -> None:
    with pytest.raises(hw.HeadwiseError, match="holds 'a' twice"):
        tokenizer_from_gguf(fields("gpt-2", ["<s>", "<e>", "a", "a", "<tool>"], []))
