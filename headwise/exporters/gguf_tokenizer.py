"""A tokenizer as GGUF metadata, or why llama.cpp could not cut text as it does."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from headwise.errors import HeadwiseError
from headwise.text import Tokenizer
from headwise.text.gguf_pretokenizers import PRE_TOKENIZERS
from headwise.text.gguf_tokenizer import CONTROL_TYPE, GGUF_SPECIAL_NAMES, UNKNOWN_TYPE, USER_DEFINED_TYPE

EXPORT_WITHOUT_TOKENIZER = "export with tokenizer=False, and feed it ids"
NORMAL_TYPE, BYTE_TYPE = 1, 6  # types of tokens that are nothing special, and of those that are one byte
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
BYTE_LEVEL_PATTERN = PRE_TOKENIZERS["gpt-2"].patterns[0]  # what ByteLevel cuts by itself


def tokenizer_fields(tokenizer: Tokenizer, vocab: int) -> dict[str, Any]:
    """`tokenizer.ggml.*` for byte-level BPE and WordPiece; `vocab` rows, those that stand for nothing filled up."""
    config = json.loads(tokenizer.backend.to_str())
    kind = config["model"]["type"]
    byte_fallback = kind == "BPE" and config["model"].get("byte_fallback")
    builders = {"BPE": _sentencepiece_fields if byte_fallback else _byte_level_fields, "WordPiece": _wordpiece_fields}
    if kind not in builders:
        raise HeadwiseError(
            f"llama.cpp has no {kind} tokenizer like this one; export with tokenizer=False, and feed it ids."
        )
    fields = builders[kind](tokenizer, config, vocab)
    for role, name in GGUF_SPECIAL_NAMES.items():
        if tokenizer.special.get(role) is not None:
            fields[f"{name}_token_id"] = tokenizer.special[role]
    prefix, suffix = tokenizer.template_ids
    if kind == "WordPiece":
        fields["bos_token_id"] = tokenizer.special["cls"]  # where llama.cpp looks for it
    else:
        for added_ids, role in ((prefix, "bos"), (suffix, "eos")):
            if added_ids not in ((), (tokenizer.special.get(role),)):
                raise HeadwiseError(
                    f"the tokenizer puts {added_ids} around a text, which GGUF cannot say; export with tokenizer=False."
                )
        fields |= {"add_bos_token": bool(prefix), "add_eos_token": bool(suffix)}
    return fields


def placeholder_tokenizer_fields(vocab: int, special: Mapping[str, int | None]) -> dict[str, Any]:
    """In place of a tokenizer: every id is written as its number, " 7 12 3", for without words llama.cpp's server ends.

    The kind is RWKV's, which takes the longest token that fits and puts nothing around a text.
    """
    ids = {
        f"{GGUF_SPECIAL_NAMES[role]}_token_id": id
        for role, id in special.items()
        if id is not None and role in ("bos", "eos")
    }
    return {"model": "rwkv", "tokens": [f" {i}" for i in range(vocab)], "token_type": [NORMAL_TYPE] * vocab, **ids}


def _byte_level_fields(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> dict[str, Any]:
    model = config["model"]
    patterns = tuple(_split_patterns(config))
    ignore_merges = bool(model.get("ignore_merges"))
    name = _pretokenizer_name(patterns, ignore_merges)
    tokens, types = _token_table(tokenizer, config, vocab)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not merges:
        raise HeadwiseError(
            f"llama.cpp's byte-level tokenizer needs merges, this one has none; {EXPORT_WITHOUT_TOKENIZER}."
        )
    return {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": types, "merges": merges}


def _split_patterns(config: dict[str, Any]) -> Iterator[str]:
    """How text is cut before it is merged, pattern by pattern."""
    pre_tokenizer = config.get("pre_tokenizer") or {}
    if config.get("normalizer") is not None:
        raise HeadwiseError(
            "the tokenizer changes text before it is cut, which GGUF cannot say; export with tokenizer=False."
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
            raise HeadwiseError(
                f"llama.cpp cannot cut text as this tokenizer does ({kind}); export with tokenizer=False."
            )


def _pretokenizer_name(patterns: tuple[str, ...], ignore_merges: bool) -> str:
    """The name by which llama.cpp knows a cut."""
    for name, pretokenizer in PRE_TOKENIZERS.items():
        if pretokenizer.patterns == patterns and pretokenizer.ignore_merges == ignore_merges and name != "default":
            return name
    description = (
        f"by these patterns: {' then '.join(patterns)[:200]}" if patterns else "that leaves a text in one piece"
    )
    raise HeadwiseError(f"llama.cpp knows no cut {description}; {EXPORT_WITHOUT_TOKENIZER}.")


def _token_table(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> tuple[list[str], list[int]]:
    """Every token in its place, and of what type it is."""
    if (max_id := max(tokenizer.backend.get_vocab().values(), default=0)) >= vocab:
        raise HeadwiseError(
            f"the tokenizer has a token {max_id}, the model only {vocab} rows; is it the model's own? Or "
            f"{EXPORT_WITHOUT_TOKENIZER}."
        )
    tokens, types = [f"[PAD{i}]" for i in range(vocab)], [CONTROL_TYPE] * vocab
    for token, i in tokenizer.backend.get_vocab().items():
        tokens[i], types[i] = token, NORMAL_TYPE
    for added in config.get("added_tokens", ()):
        types[added["id"]] = CONTROL_TYPE if added["special"] else USER_DEFINED_TYPE
    return tokens, types


def _sentencepiece_fields(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Spaces are ▁, and what no token holds is bytes. llama.cpp has no merges: it joins the pair whose token scores best."""
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
        raise HeadwiseError(
            f"llama.cpp joins tokens by score, this tokenizer in an order no score can say; {EXPORT_WITHOUT_TOKENIZER}."
        )
    for i, token in enumerate(tokens):
        types[i] = BYTE_TYPE if BYTE_TOKEN.fullmatch(token) else types[i]
    if (unknown := tokenizer.special.get("unk")) is not None:
        types[unknown] = UNKNOWN_TYPE
    scores = [-float(ranks[token]) if token in ranks else 0.0 for token in tokens]
    fields = {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": types}
    return {**fields, "add_space_prefix": prefix}


def _has_space_prefix(config: dict[str, Any]) -> bool:
    """Whether a space is put before a text; refused where spaces are treated in any other way."""
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
    raise HeadwiseError(f"llama.cpp cannot treat spaces as this tokenizer does; {EXPORT_WITHOUT_TOKENIZER}.")


def _wordpiece_fields(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> dict[str, Any]:
    """GGUF marks where words begin, BERT where they go on."""
    normalizer, pre_tokenizer = config.get("normalizer") or {}, (config.get("pre_tokenizer") or {}).get("type")
    cleans_text = normalizer.get("clean_text") and normalizer.get("handle_chinese_chars")
    if normalizer.get("type") != "BertNormalizer" or pre_tokenizer != "BertPreTokenizer" or not cleans_text:
        raise HeadwiseError(
            f"llama.cpp cleans and cuts text as BERT does, this tokenizer otherwise; {EXPORT_WITHOUT_TOKENIZER}."
        )
    if tokenizer.template_ids != ((tokenizer.special["cls"],), (tokenizer.special["sep"],)):
        raise HeadwiseError(
            f"llama.cpp puts [CLS] and [SEP] around a text, this tokenizer does not; {EXPORT_WITHOUT_TOKENIZER}."
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
