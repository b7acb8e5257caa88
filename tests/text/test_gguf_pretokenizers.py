"""Pre-tokenizers of GGUF files: against llama.cpp, with every name of llama.cpp either supported or an error."""

import json
from functools import cache
from typing import Any

import pytest

import headwise as hw
from headwise.text.gguf_pretokenizers import PRE_TOKENIZERS, UNSUPPORTED
from headwise.text.gguf_tokenizer import tokenizer_from_gguf
from tests.text.llama_cpp import FILE, gguf_fields

# Every name in llama.cpp's llama-vocab.cpp.
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
def llama_cpp_data() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


@cache
def make_gguf_tokenizer(pre: str, **extra_fields: Any) -> hw.Tokenizer:
    changed = {f"tokenizer.ggml.{name}": value for name, value in extra_fields.items()}
    return tokenizer_from_gguf(gguf_fields(pre, llama_cpp_data()["tokens"], llama_cpp_data()["merges"]) | changed)


def test_pretokenizers_cover_every_llama_cpp_name() -> None:
    assert sorted([*PRE_TOKENIZERS, *UNSUPPORTED]) == sorted(NAMES)
    # Each of them is compared below.
    assert {PRE_TOKENIZERS[name] for name in llama_cpp_data()["ids"]} == set(PRE_TOKENIZERS.values())


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_gguf_tokenizer_ids_equal_llama_cpp(pre: str) -> None:
    reference_name = next(name for name in llama_cpp_data()["ids"] if PRE_TOKENIZERS[name] == PRE_TOKENIZERS[pre])
    cased = any(r"\p{Lu}" in pattern for pattern in PRE_TOKENIZERS[pre].patterns)
    for text, ids in zip(llama_cpp_data()["texts"], llama_cpp_data()["ids"][reference_name], strict=True):
        if not (cased and "\u0301" in text):  # see below
            assert make_gguf_tokenizer(pre).encode(text) == ids, text


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "tekken"])
def test_gguf_tokenizer_llama3_adds_bos_and_keeps_vocabulary_words(pre: str) -> None:
    """A BOS token is added by default, and a piece of the vocabulary is one token even if no merge gives it."""
    token_id = llama_cpp_data()["tokens"].index("Ġqzx")
    assert make_gguf_tokenizer(pre).encode(" qzx") == [0, token_id]
    assert make_gguf_tokenizer(pre, add_bos_token=False).encode(" qzx") == [token_id]
    assert make_gguf_tokenizer("gpt-2").encode(" qzx") == [llama_cpp_data()["tokens"].index(token) for token in "Ġqzx"]


def test_gguf_tokenizer_adds_eos_if_requested() -> None:
    assert make_gguf_tokenizer("gpt-2", add_eos_token=True).encode("1") == [llama_cpp_data()["tokens"].index("1"), 1]
    assert make_gguf_tokenizer("llama3", add_eos_token=True).encode("1") == [
        0,
        llama_cpp_data()["tokens"].index("1"),
        1,
    ]
    with pytest.raises(hw.HeadwiseError, match="adds an end token but does not define it"):
        make_gguf_tokenizer("gpt-2", add_eos_token=True, eos_token_id=None)


def test_gguf_tokenizer_added_token_is_text() -> None:
    tool = llama_cpp_data()["tokens"].index("<tool>")
    assert make_gguf_tokenizer("gpt-2").encode("<tool>") == [tool]
    assert make_gguf_tokenizer("gpt-2").decode([tool, 1]) == "<tool>"


def test_gguf_tokenizer_tekken_capitals_and_accents_follow_unicode() -> None:
    r"""Ω is a capital, \p{Lu}, and starts a new word. An accent, \p{M}, belongs to its word. The pattern of llama.cpp has
    only A-Z and no accents, so the two differ here."""
    pre_tokenizer = make_gguf_tokenizer("tekken", add_bos_token=False).backend.pre_tokenizer
    assert pre_tokenizer is not None
    assert [span for _, span in pre_tokenizer.pre_tokenize_str("qzxΩ")] == [(0, 3), (3, 4)]
    assert [span for _, span in pre_tokenizer.pre_tokenize_str("cafe\u0301s")] == [(0, 6)]


@pytest.mark.parametrize(
    ("pre", "message"),
    [
        (None, r"tokenizer\.ggml\.pre: .*does not name its pre-tokenizer"),
        (
            "kimi-k2",
            r"'kimi-k2' is not supported; llama\.cpp supports it, but Headwise does not\. Use the model's folder",
        ),
        ("mine", r"'mine' is not supported; it is unknown\. Use the model's folder with its tokenizer\.json"),
    ],
)
def test_gguf_tokenizer_unknown_pretokenizer_raises(pre: str | None, message: str) -> None:
    with pytest.raises(hw.HeadwiseError, match=message):
        make_gguf_tokenizer(pre)  # pyright: ignore


def test_gguf_tokenizer_duplicate_token_raises() -> None:
    with pytest.raises(hw.HeadwiseError, match="has 'a' twice"):
        tokenizer_from_gguf(gguf_fields("gpt-2", ["<s>", "<e>", "a", "a", "<tool>"], []))
