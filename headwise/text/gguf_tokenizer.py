"""Tokenizers from the metadata of GGUF files: byte-level BPE (gpt2), SentencePiece (llama, t5), WordPiece (bert)."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headwise.errors import FileFormatError, HeadwiseError
from headwise.text.gguf_pretokenizers import pretokenizer_for
from headwise.text.tokenizer import Tokenizer

# Types of tokens that are matched before pre-tokenization. The first two are special tokens.
UNKNOWN_TYPE, CONTROL_TYPE, USER_DEFINED_TYPE = 2, 3, 4
NORMAL_TYPE = 1
PLACEHOLDER_TOKENIZER = "rwkv"  # of files that Headwise writes without a tokenizer: ids as decimal numbers

# GGUF names of the special tokens, with its spelling.
GGUF_SPECIAL_NAMES = {
    "bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown", "mask": "mask", "cls": "cls", "sep": "seperator",
}  # fmt: skip


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """Build a tokenizer from the `tokenizer.ggml.*` fields of a GGUF file."""
    kind = fields.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram, "bert": _wordpiece}
    if kind not in builders:
        raise FileFormatError(
            f"tokenizer.ggml.model: this GGUF tokenizer is not supported. Got {kind!r}. Supported are {', '.join(builders)}; "
            "use the model folder with its tokenizer.json."
        )
    if "tokenizer.ggml.tokens" not in fields:
        raise FileFormatError(
            "tokenizer.ggml.tokens: the GGUF file has a tokenizer without tokens. Convert the model again with its tokenizer."
        )
    try:
        return builders[kind](fields)
    except HeadwiseError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise FileFormatError(
            f"tokenizer.ggml: the GGUF tokenizer is inconsistent ({error}). Convert the model again."
        ) from None


def _byte_level(fields: Mapping[str, Any]) -> Tokenizer:
    pretokenizer = pretokenizer_for(fields.get("tokenizer.ggml.pre"))
    merges = [_split_merge(merge) for merge in fields.get("tokenizer.ggml.merges", [])]
    backend = Backend(
        models.BPE(_vocabulary(fields), merges, ignore_merges=pretokenizer.ignore_merges)  # pyright: ignore[reportCallIssue]
    )
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pretokenizer.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    return _add_special_tokens(backend, fields, add_bos=pretokenizer.add_bos)


def _vocabulary(fields: Mapping[str, Any]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for i, token in enumerate(fields["tokenizer.ggml.tokens"]):
        if vocab.setdefault(token or f"[EMPTY_{i}]", i) != i:
            raise FileFormatError(
                f"tokenizer.ggml.tokens: the GGUF vocabulary has {token!r} twice, at {vocab[token]} and {i}. "
                "Download or convert the file again."
            )
    return vocab


def _sentencepiece(fields: Mapping[str, Any]) -> Tokenizer:
    tokens, scores, vocab = fields["tokenizer.ggml.tokens"], _scores(fields), _vocabulary(fields)
    ranked = []  # each split of a token into two tokens is a merge, ranked by the score of the token
    for token, score in zip(tokens, scores, strict=True):
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        ranked += [(-score, vocab[left], vocab[right], left, right) for left, right in splits]
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    backend = Backend(
        models.BPE(  # pyright: ignore[reportCallIssue]
            vocab, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True
        )
    )
    add_space_prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    backend.normalizer = normalizers.Sequence(  # pyright: ignore
        [*([normalizers.Prepend("▁")] if add_space_prefix else []), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if add_space_prefix else [])])  # pyright: ignore
    return _add_special_tokens(backend, fields, add_bos=True)


def _scores(fields: Mapping[str, Any]) -> list[float]:
    tokens, scores = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise FileFormatError(
            f"tokenizer.ggml.scores: the GGUF tokenizer has {len(tokens)} tokens and {len(scores)} scores. "
            "Convert the model again."
        )
    return list(scores)


def _unigram(fields: Mapping[str, Any]) -> Tokenizer:
    """Build the Unigram tokenizer of T5. As in llama.cpp, only spaces separate words."""
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 2)  # llama.cpp's default
    scores, types = _scores(fields), fields.get("tokenizer.ggml.token_type", [])
    lowest = min((score for score, kind in zip(scores, types, strict=False) if kind == NORMAL_TYPE), default=None)
    if lowest is not None:  # the library derives the cost of unknown characters from all scores, llama.cpp from these
        scores = [max(score, lowest) for score in scores]
    vocab = list(zip(_vocabulary(fields), scores, strict=True))
    backend = Backend(models.Unigram(vocab, unknown, byte_fallback=False))  # pyright: ignore
    charsmap = fields.get("tokenizer.ggml.precompiled_charsmap")
    steps: list[Any] = [normalizers.Precompiled(bytes(value & 255 for value in charsmap))] if charsmap else []
    if fields.get("tokenizer.ggml.remove_extra_whitespaces", True):
        scheme = "always"
        split = pre_tokenizers.Split(" ", "removed")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Metaspace("▁", scheme)])  # pyright: ignore
    else:
        scheme = "always" if fields.get("tokenizer.ggml.add_space_prefix", True) else "never"
        steps += [normalizers.Prepend("▁")] if scheme == "always" else []
        steps.append(normalizers.Replace(" ", "▁"))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)  # pyright: ignore
    backend.decoder = decoders.Metaspace("▁", scheme)  # pyright: ignore
    return _add_special_tokens(backend, fields, add_bos=False, add_eos=True)


def _wordpiece(fields: Mapping[str, Any]) -> Tokenizer:
    """Build a WordPiece tokenizer. GGUF marks the start of words with ▁, and BERT marks continuations with ##."""
    special_ids = set(_special_ids(fields).values())
    pieces = []
    for i, token in enumerate(fields["tokenizer.ggml.tokens"]):
        is_literal = i in special_ids or (len(token) > 2 and token[0] == "[" and token[-1] == "]")
        pieces.append(token if is_literal else token[1:] if token.startswith("▁") else f"##{token}")
    return Tokenizer.from_wordpiece(pieces, lowercase=bool(fields.get("tokenizer.ggml.normalizer.lowercase", True)))


def _add_special_tokens(
    backend: Backend, fields: Mapping[str, Any], *, add_bos: bool, add_eos: bool = False
) -> Tokenizer:
    """Add special tokens and the BOS/EOS template of the file, by default with BOS if `add_bos` and EOS if `add_eos`."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type", [])
    for token, kind in zip(tokens, types, strict=False):
        if kind in (UNKNOWN_TYPE, CONTROL_TYPE):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED_TYPE:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])
    special_ids = _special_ids(fields)
    template = []
    for name, enabled in (
        ("bos", fields.get("tokenizer.ggml.add_bos_token", add_bos)),
        ("eos", fields.get("tokenizer.ggml.add_eos_token", add_eos)),
    ):
        if enabled and special_ids[name] is None:
            label = "a start" if name == "bos" else "an end"
            raise FileFormatError(
                f"tokenizer.ggml.{name}_token_id: the GGUF tokenizer adds {label} token but does not define it. "
                "Convert the model again."
            )
        template.append([(tokens[special_ids[name]], special_ids[name])] if enabled else [])
    if any(template):
        prefix, suffix = ([f"{token}" for token, _ in side] for side in template)
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore
            [*prefix, "$A", *suffix], [*prefix, "$A", *suffix, "$B", *suffix], [*template[0], *template[1]]
        )
    return Tokenizer(backend, special_ids)


def _special_ids(fields: Mapping[str, Any]) -> dict[str, int | None]:
    return {key: fields.get(f"tokenizer.ggml.{name}_token_id") for key, name in GGUF_SPECIAL_NAMES.items()}


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
