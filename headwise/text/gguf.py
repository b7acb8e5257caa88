"""A tokenizer out of a GGUF file's metadata: byte-level BPE (gpt2), SentencePiece BPE (llama) or WordPiece (bert)."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headwise.errors import HeadwiseError
from headwise.text.tokenizer import Tokenizer

# How text is cut before byte-level merging, by the name GGUF gives it. Patterns as llama.cpp documents them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CUTS = {"default": None, "gpt-2": None, "smollm": "digits", "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}

CONTROL = 3  # the type GGUF gives to tokens that are no text


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """Build it from `tokenizer.ggml.*` fields."""
    kind = fields.get("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "bert": _wordpiece}
    if kind not in makers:
        raise HeadwiseError(f"the GGUF file has a {kind!r} tokenizer; those supported are {', '.join(makers)}.")
    if "tokenizer.ggml.tokens" not in fields:
        raise HeadwiseError("the GGUF file names a tokenizer but holds no tokens; convert it again with its tokenizer.")
    try:
        return makers[kind](fields)
    except HeadwiseError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise HeadwiseError(f"the GGUF tokenizer does not hold together: {error}") from None


def _byte_level(fields: Mapping[str, Any]) -> Tokenizer:
    tokens, merges = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.merges", [])
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, [_pair(merge) for merge in merges]))  # pyright: ignore[reportCallIssue]
    cut = _cut(fields)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut in (None, "digits"))
    if cut == "digits":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    else:
        first = [] if cut is None else [pre_tokenizers.Split(Regex(cut), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    return _finish(backend, fields)


def _cut(fields: Mapping[str, Any]) -> str | None:
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in CUTS:
        raise HeadwiseError(f"the GGUF tokenizer cuts text the {name!r} way; those supported are {', '.join(CUTS)}.")
    return CUTS[name]


def _sentencepiece(fields: Mapping[str, Any]) -> Tokenizer:
    tokens, scores = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise HeadwiseError(
            f"the GGUF tokenizer has {len(tokens)} tokens and {len(scores)} scores; convert the file again."
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = []  # every way to make a token of two others is a merge; the better the token's score, the earlier
    for token, score in zip(tokens, scores, strict=True):
        parts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        ranked += [(-score, vocab[left], vocab[right], left, right) for left, right in parts]
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    backend = Backend(
        models.BPE(  # pyright: ignore[reportCallIssue]
            vocab, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True
        )
    )
    spaced = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    backend.normalizer = normalizers.Sequence(  # pyright: ignore
        [*([normalizers.Prepend("▁")] if spaced else []), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if spaced else [])])  # pyright: ignore
    return _finish(backend, fields)


def _wordpiece(fields: Mapping[str, Any]) -> Tokenizer:
    """GGUF marks word beginnings with ▁ where BERT marks continuations with ##."""
    special = set(_specials(fields).values())
    pieces = []
    for i, token in enumerate(fields["tokenizer.ggml.tokens"]):
        plain = i in special or (len(token) > 2 and token[0] == "[" and token[-1] == "]")
        pieces.append(token if plain else token[1:] if token.startswith("▁") else f"##{token}")
    return Tokenizer.from_wordpiece(pieces)


def _finish(backend: Backend, fields: Mapping[str, Any]) -> Tokenizer:
    """Special tokens, and a start token in front where the file asks for one."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type", [])
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    special = _specials(fields)
    if fields.get("tokenizer.ggml.add_bos_token", fields.get("tokenizer.ggml.model") == "llama"):
        bos = special["bos"]
        if bos is None:
            raise HeadwiseError("the GGUF tokenizer asks for a start token but names none.")
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore
            f"{tokens[bos]} $A", f"{tokens[bos]} $A $B", [(tokens[bos], bos)]
        )
    return Tokenizer(backend, special)


def _specials(fields: Mapping[str, Any]) -> dict[str, int | None]:
    names = {
        "bos": "bos",
        "eos": "eos",
        "pad": "padding",
        "unk": "unknown",
        "mask": "mask",
        "cls": "cls",
        "sep": "seperator",
    }
    return {role: fields.get(f"tokenizer.ggml.{name}_token_id") for role, name in names.items()}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
