"""Conversion of a tokenizer to GGUF metadata. Raises an error if llama.cpp would tokenize text differently."""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.text import Tokenizer
from headwise.text.gguf_pretokenizers import PRE_TOKENIZERS
from headwise.text.gguf_tokenizer import (
    CONTROL_TYPE,
    GGUF_SPECIAL_NAMES,
    NORMAL_TYPE,
    PLACEHOLDER_TOKENIZER,
    UNKNOWN_TYPE,
    USER_DEFINED_TYPE,
)

EXPORT_WITHOUT_TOKENIZER = "Export with tokenizer=False and pass token ids"
BYTE_TYPE = 6  # GGUF type of single-byte tokens
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
BYTE_LEVEL_PATTERN = PRE_TOKENIZERS["gpt-2"].patterns[0]  # the built-in split pattern of ByteLevel


def tokenizer_fields(tokenizer: Tokenizer, vocab: int) -> dict[str, Any]:
    """Return the `tokenizer.ggml.*` fields of a tokenizer. Unused rows of `vocab` are padding tokens."""
    config = json.loads(tokenizer.backend.to_str())
    kind = config["model"]["type"]
    byte_fallback = kind == "BPE" and config["model"].get("byte_fallback")
    bpe_fields = _sentencepiece_fields if byte_fallback else _byte_level_fields
    builders = {"BPE": bpe_fields, "Unigram": _unigram_fields, "WordPiece": _wordpiece_fields}
    if kind not in builders:
        raise UnsupportedModelError(
            f"tokenizer: llama.cpp does not support this {kind} tokenizer. {EXPORT_WITHOUT_TOKENIZER}."
        )
    fields = builders[kind](tokenizer, config, vocab)
    for role, name in GGUF_SPECIAL_NAMES.items():
        if tokenizer.special.get(role) is not None:
            fields[f"{name}_token_id"] = tokenizer.special[role]
    prefix, suffix = tokenizer.template_ids
    if kind == "WordPiece":
        fields["bos_token_id"] = tokenizer.special["cls"]  # llama.cpp reads [CLS] from this field
    else:
        for added_ids, role, encoder_role in ((prefix, "bos", "cls"), (suffix, "eos", "sep")):
            if tokenizer.special.get(role) is None and added_ids == (tokenizer.special.get(encoder_role),):
                fields[f"{role}_token_id"] = added_ids[0]  # ModernBERT adds [CLS] and [SEP]
            elif added_ids not in ((), (tokenizer.special.get(role),)):
                raise UnsupportedModelError(
                    f"tokenizer: it adds the token ids {added_ids} to each text, but GGUF can only add {role.upper()}. "
                    f"{EXPORT_WITHOUT_TOKENIZER}."
                )
        fields |= {"add_bos_token": bool(prefix), "add_eos_token": bool(suffix)}
    return fields


def placeholder_tokenizer_fields(vocab: int, special: Mapping[str, int | None]) -> dict[str, Any]:
    """Return a placeholder tokenizer that writes each id as a decimal number, such as " 7 12 3".

    llama.cpp's server requires a vocabulary. The type is RWKV's, which takes the longest matching token and adds no special
    tokens.
    """
    ids = {
        f"{GGUF_SPECIAL_NAMES[role]}_token_id": id
        for role, id in special.items()
        if id is not None and role in ("bos", "eos")
    }
    return {
        "model": PLACEHOLDER_TOKENIZER,
        "tokens": [f" {i}" for i in range(vocab)],
        "token_type": [NORMAL_TYPE] * vocab,
        **ids,
    }


def _byte_level_fields(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> dict[str, Any]:
    model = config["model"]
    patterns = tuple(_split_patterns(config))
    ignore_merges = bool(model.get("ignore_merges"))
    name = _pretokenizer_name(patterns, ignore_merges=ignore_merges)
    tokens, types = _token_table(tokenizer, config, vocab)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not merges:
        raise UnsupportedModelError(
            f"tokenizer: llama.cpp's byte-level BPE requires merges, but this tokenizer has an empty merge list. "
            f"{EXPORT_WITHOUT_TOKENIZER}."
        )
    return {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": types, "merges": merges}


def _split_patterns(config: dict[str, Any]) -> Iterator[str]:
    """Yield the patterns that split text before the merges."""
    pre_tokenizer = config.get("pre_tokenizer") or {}
    if config.get("normalizer") is not None:
        raise UnsupportedModelError(
            f"tokenizer: it has a normalizer, which GGUF cannot store for byte-level BPE. {EXPORT_WITHOUT_TOKENIZER}."
        )
    for stage in pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]:
        kind, inverted = stage.get("type"), stage.get("invert", False)
        if kind == "Split" and stage["behavior"] == "Isolated" and not inverted:
            yield stage["pattern"].get("Regex") or stage["pattern"]["String"]
        elif kind == "Digits" and stage["individual_digits"]:
            yield r"\p{N}"
        elif kind == "ByteLevel" and not stage["add_prefix_space"]:
            if stage["use_regex"]:
                yield BYTE_LEVEL_PATTERN
        else:
            raise UnsupportedModelError(
                f"tokenizer: llama.cpp does not support its pre-tokenizer {kind} with these settings. "
                f"{EXPORT_WITHOUT_TOKENIZER}."
            )


def _pretokenizer_name(patterns: tuple[str, ...], *, ignore_merges: bool) -> str:
    """Return llama.cpp's name for a pre-tokenizer."""
    for name, pretokenizer in PRE_TOKENIZERS.items():
        if pretokenizer.patterns == patterns and pretokenizer.ignore_merges == ignore_merges and name != "default":
            return name
    description = f"with the patterns {' then '.join(patterns)[:200]}" if patterns else "that does not split text"
    raise UnsupportedModelError(f"tokenizer: llama.cpp has no pre-tokenizer {description}. {EXPORT_WITHOUT_TOKENIZER}.")


def _token_table(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> tuple[list[str], list[int]]:
    """Return the text and the GGUF type of every token, by id."""
    if (max_id := max(tokenizer.backend.get_vocab().values(), default=0)) >= vocab:
        raise ArgumentError(
            f"tokenizer: it has a token with id {max_id}, but the model has only {vocab} embeddings. Check that the "
            f"tokenizer belongs to the model. {EXPORT_WITHOUT_TOKENIZER}."
        )
    tokens, types = [f"[PAD{i}]" for i in range(vocab)], [CONTROL_TYPE] * vocab
    for token, i in tokenizer.backend.get_vocab().items():
        tokens[i], types[i] = token, NORMAL_TYPE
    for added in config.get("added_tokens", ()):
        types[added["id"]] = CONTROL_TYPE if added["special"] else USER_DEFINED_TYPE
    return tokens, types


def _sentencepiece_fields(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Convert SentencePiece BPE with ▁ for spaces and byte fallback.

    llama.cpp has no merge list for it: it merges the pair whose token has the best score.
    """
    model, prefix = config["model"], _has_space_prefix(config)
    tokens, types = _token_table(tokenizer, config, vocab)
    normal_tokens = {
        token
        for token, kind in zip(tokens, types, strict=True)
        if kind == NORMAL_TYPE and not BYTE_TOKEN.fullmatch(token)
    }
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    merged = ["".join(merge) for merge in merges]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(merged))}
    splits = {
        (candidate[:i], candidate[i:])
        for candidate in normal_tokens
        for i in range(1, len(candidate))
        if candidate[:i] in normal_tokens and candidate[i:] in normal_tokens
    }
    if splits != set(merges) or [ranks[token] for token in merged] != sorted(ranks[token] for token in merged):
        raise UnsupportedModelError(
            f"tokenizer: llama.cpp merges tokens by score, and the merge order of this tokenizer cannot be expressed by "
            f"scores. {EXPORT_WITHOUT_TOKENIZER}."
        )
    for i, token in enumerate(tokens):
        types[i] = BYTE_TYPE if BYTE_TOKEN.fullmatch(token) else types[i]
    if (unknown := tokenizer.special.get("unk")) is not None:
        types[unknown] = UNKNOWN_TYPE
    scores = [-float(ranks[token]) if token in ranks else 0.0 for token in tokens]
    fields = {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": types}
    return {**fields, "add_space_prefix": prefix}


def _has_space_prefix(config: dict[str, Any]) -> bool:
    """Return whether the tokenizer adds a space before a text. Raise an error if it treats spaces in any other way."""
    normalizer, pre_tokenizer = config.get("normalizer"), config.get("pre_tokenizer")
    steps = (
        [] if normalizer is None else normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    )
    space_rule = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if (
        pre_tokenizer is None
        and steps
        and steps[-1] == space_rule
        and steps[:-1] in ([], [{"type": "Prepend", "prepend": "▁"}])
    ):
        return len(steps) == 2
    metaspace = {"type": "Metaspace", "replacement": "▁", "split": False}
    if normalizer is None and pre_tokenizer in (
        {**metaspace, "prepend_scheme": "always"},
        {**metaspace, "prepend_scheme": "never"},
    ):
        return pre_tokenizer["prepend_scheme"] == "always"
    raise UnsupportedModelError(
        f"tokenizer: llama.cpp does not support the way this tokenizer treats spaces. {EXPORT_WITHOUT_TOKENIZER}."
    )


WHITE_SPACE = [
    chr(code)
    for code in (*range(9, 14), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
]


def _unigram_fields(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Convert the Unigram tokenizer of T5: a table of replaced characters, then words that begin with ▁."""
    charsmap, problems = _charsmap_and_problems(tokenizer, config)
    model = config["model"]
    problems |= {
        "it has byte fallback": bool(model.get("byte_fallback")),
        "it has no unknown token": model["unk_id"] is None,
        "one of its tokens has ▁ after its first character": any("▁" in token[1:] for token, _ in model["vocab"]),
    }
    for problem, applies in problems.items():
        if applies:
            raise UnsupportedModelError(
                f"tokenizer: llama.cpp does not support this Unigram tokenizer, because {problem}. "
                f"{EXPORT_WITHOUT_TOKENIZER}."
            )
    tokens, types = _token_table(tokenizer, config, vocab)
    types[model["unk_id"]] = UNKNOWN_TYPE
    scores = [score for _, score in model["vocab"]]
    scores += [0.0] * (len(tokens) - len(scores))  # added tokens and padding are never matched by score
    return {
        "model": "t5", "pre": "default", "tokens": tokens, "scores": scores, "token_type": types,
        "add_space_prefix": True, "remove_extra_whitespaces": True, "unknown_token_id": model["unk_id"],
        **({"precompiled_charsmap": charsmap} if charsmap else {}),
    }  # fmt: skip


def _charsmap_and_problems(tokenizer: Tokenizer, config: dict[str, Any]) -> tuple[bytes, dict[str, bool]]:
    """Return the table of replaced characters, and why llama.cpp normalizes or splits text differently, if so."""
    normalizer, pre_tokenizer = config.get("normalizer"), config.get("pre_tokenizer") or {}
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    charsmap = b""
    if steps and steps[0]["type"] == "Precompiled":
        charsmap, steps = base64.b64decode(steps[0]["precompiled_charsmap"] or ""), steps[1:]
    stages = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    *splits, last = stages
    splits_at_spaces = splits == [{"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}]
    merges_spaces = [step["type"] for step in steps] == ["Strip", "Replace"] and steps[1]["pattern"] == {
        "Regex": " {2,}"
    }
    is_prefixed = last.get("type") == "Metaspace" and last["replacement"] == "▁" and last["prepend_scheme"] == "always"
    normalize = (
        (lambda text: text) if tokenizer.backend.normalizer is None else tokenizer.backend.normalizer.normalize_str
    )
    return charsmap, {
        "its words do not begin with ▁": not is_prefixed,
        "it keeps runs of spaces": not splits and not steps,
        "its normalizer does more than replace characters and merge spaces": bool(steps)
        and (bool(splits) or not merges_spaces),
        "it splits text in another way than at spaces": not splits_at_spaces
        and splits not in ([], [{"type": "WhitespaceSplit"}]),
        "its normalizer does not replace other white space by spaces": not splits_at_spaces
        and any(normalize(f"a{character}b") != "a b" for character in WHITE_SPACE),
    }


def _wordpiece_fields(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Convert WordPiece: GGUF marks the start of a word, BERT marks continuations."""
    normalizer, pre_tokenizer = config.get("normalizer") or {}, (config.get("pre_tokenizer") or {}).get("type")
    cleans_text = normalizer.get("clean_text") and normalizer.get("handle_chinese_chars")
    if normalizer.get("type") != "BertNormalizer" or pre_tokenizer != "BertPreTokenizer" or not cleans_text:
        raise UnsupportedModelError(
            f"tokenizer: llama.cpp normalizes and splits text as BERT does, but this tokenizer does not. "
            f"{EXPORT_WITHOUT_TOKENIZER}."
        )
    if tokenizer.template_ids != ((tokenizer.special["cls"],), (tokenizer.special["sep"],)):
        raise UnsupportedModelError(
            f"tokenizer: llama.cpp adds [CLS] and [SEP] to each text, but this tokenizer does not. "
            f"{EXPORT_WITHOUT_TOKENIZER}."
        )
    tokens, types = _token_table(tokenizer, config, vocab)
    special = {added["id"] for added in config.get("added_tokens", ())}
    for i, token in enumerate(tokens):
        if types[i] == NORMAL_TYPE and i not in special:
            tokens[i] = token[2:] if token.startswith("##") else f"▁{token}"
    lower, strip_accents = normalizer["lowercase"], normalizer.get("strip_accents")
    return {
        "model": "bert", "tokens": tokens, "token_type": types, "normalizer.lowercase": lower,
        "normalizer.strip_accents": lower if strip_accents is None else strip_accents,
    }  # fmt: skip
