"""A tokenizer as GGUF metadata, or why llama.cpp could not cut text as it does."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from headwise.errors import HeadwiseError
from headwise.text import Tokenizer
from headwise.text.gguf import ADDED, CONTROL, SPECIALS, UNKNOWN
from headwise.text.gguf_pretokenizers import CUTS

INSTEAD = "export with tokenizer=False, and feed it ids"
NORMAL, BYTE_TYPE = 1, 6  # types of tokens that are nothing special, and of those that are one byte
BYTE = re.compile("<0x[0-9A-F]{2}>")
BYTE_LEVEL = CUTS["gpt-2"].patterns[0]  # what ByteLevel cuts by itself


def tokenizer_fields(tokenizer: Tokenizer, vocab: int) -> dict[str, Any]:
    """`tokenizer.ggml.*` for byte-level BPE and WordPiece; `vocab` rows, those that stand for nothing filled up."""
    config = json.loads(tokenizer.backend.to_str())
    kind = config["model"]["type"]
    spaces = kind == "BPE" and config["model"].get("byte_fallback")
    makers = {"BPE": _sentencepiece if spaces else _byte_level, "WordPiece": _wordpiece}
    if kind not in makers:
        raise HeadwiseError(
            f"llama.cpp has no {kind} tokenizer like this one; export with tokenizer=False, and feed it ids."
        )
    fields = makers[kind](tokenizer, config, vocab)
    for role, name in SPECIALS.items():
        if tokenizer.special.get(role) is not None:
            fields[f"{name}_token_id"] = tokenizer.special[role]
    before, behind = tokenizer.around
    if kind == "WordPiece":
        fields["bos_token_id"] = tokenizer.special["cls"]  # where llama.cpp looks for it
    else:
        for side, role in ((before, "bos"), (behind, "eos")):
            if side not in ((), (tokenizer.special.get(role),)):
                raise HeadwiseError(
                    f"the tokenizer puts {side} around a text, which GGUF cannot say; export with tokenizer=False."
                )
        fields |= {"add_bos_token": bool(before), "add_eos_token": bool(behind)}
    return fields


def numbers_as_words(vocab: int, special: Mapping[str, int | None]) -> dict[str, Any]:
    """In place of a tokenizer: every id is written as its number, " 7 12 3", for without words llama.cpp's server ends.

    The kind is RWKV's, which takes the longest token that fits and puts nothing around a text.
    """
    ids = {
        f"{SPECIALS[role]}_token_id": id for role, id in special.items() if id is not None and role in ("bos", "eos")
    }
    return {"model": "rwkv", "tokens": [f" {i}" for i in range(vocab)], "token_type": [NORMAL] * vocab, **ids}


def _byte_level(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> dict[str, Any]:
    model = config["model"]
    patterns = tuple(_patterns(config))
    whole_first = bool(model.get("ignore_merges"))
    name = _name_of(patterns, whole_first)
    tokens, types = _tokens(tokenizer, config, vocab)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if not merges:
        raise HeadwiseError(f"llama.cpp's byte-level tokenizer needs merges, this one has none; {INSTEAD}.")
    return {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": types, "merges": merges}


def _patterns(config: dict[str, Any]) -> Iterator[str]:
    """How text is cut before it is merged, pattern by pattern."""
    step = config.get("pre_tokenizer") or {}
    if config.get("normalizer") is not None:
        raise HeadwiseError(
            "the tokenizer changes text before it is cut, which GGUF cannot say; export with tokenizer=False."
        )
    for part in step["pretokenizers"] if step.get("type") == "Sequence" else [step]:
        kind, inverted = part.get("type"), part.get("invert", False)
        if kind == "Split" and part["behavior"] == "Isolated" and not inverted:
            yield part["pattern"].get("Regex") or part["pattern"]["String"]
        elif kind == "Digits" and part["individual_digits"]:
            yield r"\p{N}"
        elif kind == "ByteLevel" and not part["add_prefix_space"]:
            if part["use_regex"]:
                yield BYTE_LEVEL
        else:
            raise HeadwiseError(
                f"llama.cpp cannot cut text as this tokenizer does ({kind}); export with tokenizer=False."
            )


def _name_of(patterns: tuple[str, ...], whole_first: bool) -> str:
    """The name by which llama.cpp knows a cut."""
    for name, cut in CUTS.items():
        if cut.patterns == patterns and cut.whole_first == whole_first and name != "default":
            return name
    how = f"by these patterns: {' then '.join(patterns)[:200]}" if patterns else "that leaves a text in one piece"
    raise HeadwiseError(f"llama.cpp knows no cut {how}; {INSTEAD}.")


def _tokens(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> tuple[list[str], list[int]]:
    """Every token in its place, and of what type it is."""
    if (most := max(tokenizer.backend.get_vocab().values(), default=0)) >= vocab:
        raise HeadwiseError(
            f"the tokenizer has a token {most}, the model only {vocab} rows; is it the model's own? Or {INSTEAD}."
        )
    tokens, types = [f"[PAD{i}]" for i in range(vocab)], [CONTROL] * vocab
    for token, i in tokenizer.backend.get_vocab().items():
        tokens[i], types[i] = token, NORMAL
    for added in config.get("added_tokens", ()):
        types[added["id"]] = CONTROL if added["special"] else ADDED
    return tokens, types


def _sentencepiece(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Spaces are ▁, and what no token holds is bytes. llama.cpp has no merges: it joins the pair whose token scores best."""
    model, prefix = config["model"], _space_prefix(config)
    tokens, types = _tokens(tokenizer, config, vocab)
    known = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL and not BYTE.fullmatch(token)}
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    made = ["".join(merge) for merge in merges]
    ranks = {token: place for place, token in enumerate(dict.fromkeys(made))}
    splits = {(one[:i], one[i:]) for one in known for i in range(1, len(one)) if one[:i] in known and one[i:] in known}
    if splits != set(merges) or [ranks[token] for token in made] != sorted(ranks[token] for token in made):
        raise HeadwiseError(f"llama.cpp joins tokens by score, this tokenizer in an order no score can say; {INSTEAD}.")
    for i, token in enumerate(tokens):
        types[i] = BYTE_TYPE if BYTE.fullmatch(token) else types[i]
    if (unknown := tokenizer.special.get("unk")) is not None:
        types[unknown] = UNKNOWN
    scores = [-float(ranks[token]) if token in ranks else 0.0 for token in tokens]
    fields = {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": types}
    return {**fields, "add_space_prefix": prefix}


def _space_prefix(config: dict[str, Any]) -> bool:
    """Whether a space is put before a text; refused where spaces are treated in any other way."""
    norm, cut = config.get("normalizer"), config.get("pre_tokenizer")
    steps = [] if norm is None else norm["normalizers"] if norm["type"] == "Sequence" else [norm]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if cut is None and steps and steps[-1] == spaces and steps[:-1] in ([], [{"type": "Prepend", "prepend": "▁"}]):
        return len(steps) == 2
    whole = {"type": "Metaspace", "replacement": "▁", "split": False}
    if norm is None and cut in ({**whole, "prepend_scheme": "always"}, {**whole, "prepend_scheme": "never"}):
        return cut["prepend_scheme"] == "always"
    raise HeadwiseError(f"llama.cpp cannot treat spaces as this tokenizer does; {INSTEAD}.")


def _wordpiece(tokenizer: Tokenizer, config: dict[str, Any], vocab: int) -> dict[str, Any]:
    """GGUF marks where words begin, BERT where they go on."""
    norm, cut = config.get("normalizer") or {}, (config.get("pre_tokenizer") or {}).get("type")
    clean = norm.get("clean_text") and norm.get("handle_chinese_chars")
    if norm.get("type") != "BertNormalizer" or cut != "BertPreTokenizer" or not clean:
        raise HeadwiseError(f"llama.cpp cleans and cuts text as BERT does, this tokenizer otherwise; {INSTEAD}.")
    if tokenizer.around != ((tokenizer.special["cls"],), (tokenizer.special["sep"],)):
        raise HeadwiseError(f"llama.cpp puts [CLS] and [SEP] around a text, this tokenizer does not; {INSTEAD}.")
    tokens, types = _tokens(tokenizer, config, vocab)
    special = {added["id"] for added in config.get("added_tokens", ())}
    for i, token in enumerate(tokens):
        if types[i] == NORMAL and i not in special:
            tokens[i] = token[2:] if token.startswith("##") else f"▁{token}"
    lower, bare = norm["lowercase"], norm.get("strip_accents")
    return {
        "model": "bert", "tokens": tokens, "token_type": types, "normalizer.lowercase": lower,
        "normalizer.strip_accents": lower if bare is None else bare,
    }  # fmt: skip
