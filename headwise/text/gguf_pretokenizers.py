r"""Pre-tokenization patterns of byte-level tokenizers in GGUF files, by the name in `tokenizer.ggml.pre`.

Names and patterns are those of llama.cpp (https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp). Its regular
expressions do not support (?i) and \p{Lu}, so some of its patterns differ from the tokenizer.json of the model. In these
cases the pattern of the tokenizer.json is used, which llama.cpp lists as well. A pre-tokenizer is a list of patterns, applied
one after another: matches and the text between them become pieces.
"""

from dataclasses import dataclass

from headwise.errors import FileFormatError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _tiktoken_pattern(
    word: str = r"\p{L}+", number: str = r"\p{N}", punctuation: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
) -> str:
    """Return the pattern of tiktoken's cl100k and its successors: contractions, words, numbers, punctuation, spaces."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{word}|{number}|{punctuation}|{_WHITESPACE}"


def _cased_pattern(suffix: str, number: str) -> str:
    """Return a pattern in which a capital after a lowercase letter starts a new word. `suffix` may follow a word."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    prefix = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{prefix}{upper}*{lower}+{suffix}|{prefix}{upper}+{lower}*{suffix}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}"


_LLAMA3 = _tiktoken_pattern(number=r"\p{N}{1,3}")
_QWEN2 = _tiktoken_pattern()
_GPT4O = _cased_pattern(rf"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _WHITESPACE,
)
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\x{1F5F}-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄ"
    r"ῆ-ῌ\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-\ud7ff]+",
    r"\p{N}+",
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """One way to split text into pieces.

    Attributes:
        patterns: Regular expressions, applied in order.
        ignore_merges: Use a piece that is in the vocabulary as one token, without merges.
        add_bos: Add a BOS token if the file does not say otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_PRE_TOKENIZER_FAMILIES: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 modern-bert": PreTokenizer(
        (_GPT2,)
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer((r"\p{N}", _GPT2)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe": PreTokenizer((_LLAMA3,)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _tiktoken_pattern(number=r"\p{N}+")), ignore_merges=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_tiktoken_pattern(word=r"[\p{L}\p{M}]+", punctuation=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(f"{_CONTRACTIONS}|"),)),
    "seed-coder": PreTokenizer((_tiktoken_pattern(punctuation=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": PreTokenizer(_DEEPSEEK3),
    "tekken": PreTokenizer((_cased_pattern("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer((_GPT4O,)),
    "poro-chat bloom gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
}
PRE_TOKENIZERS = {
    name: pre_tokenizer for names, pre_tokenizer in _PRE_TOKENIZER_FAMILIES.items() for name in names.split()
}

# Names that llama.cpp knows and Headwise does not support: patterns implemented in code, text that is not byte-level,
# encoders, and names whose meaning changed between releases (glm4).
UNSUPPORTED = frozenset(
    [
        "glm4",
        "chatglm-bpe",
        "spark2_5",
        "youtu",
        "jais-2",
        "exaone-moe",
        "chameleon",
        "granite-embed-multi-97m",
        "granite-embed-multi-311m",
        "tiny_aya",
        "cohere2moe",
        "superbpe",
        "bailingmoe",
        "bailingmoe2",
        "llada-moe",
        "kimi-k2",
        "afmoe",
        "gemma4",
        "sarvam-moe",
        "whitespace",
        "jina-es",
        "jina-de",
        "jina-v1-en",
        "jina-v2-es",
        "jina-v2-de",
        "jina-v2-code",
        "jina-v5-nano",
        "roberta-bpe",
    ]
)


def pretokenizer_for(name: str | None) -> PreTokenizer:
    """Return the pre-tokenizer of a GGUF file. Raise for unknown names, because guessing would give wrong ids.

    >>> pretokenizer_for("llama-bpe").add_bos
    True
    """
    hint = "Use the model's folder with its tokenizer.json"
    if name is None:
        raise FileFormatError(
            "tokenizer.ggml.pre: the GGUF file does not name its pre-tokenizer. "
            f"{hint}, or convert the file again with a current llama.cpp."
        )
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    reason = "llama.cpp supports it, but Headwise does not" if name in UNSUPPORTED else "it is unknown"
    raise FileFormatError(
        f"tokenizer.ggml.pre: the pre-tokenizer {name!r} is not supported; {reason}. {hint}. "
        f"Supported are {', '.join(PRE_TOKENIZERS)}."
    )
