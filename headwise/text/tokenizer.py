"""Tokenizers, through the `tokenizers` library: from tokenizer.json, a WordPiece vocabulary or GGUF metadata."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import Encoding, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headwise.errors import HeadwiseError
from headwise.text.token_alignment import Alignment

SURROGATE = re.compile("[\ud800-\udfff]")
SPECIAL_TOKEN_NAMES = ("bos", "eos", "pad", "unk", "mask", "cls", "sep")


class Tokenizer:
    """Text to ids and back. `bos`, `eos`, `pad`, `unk`, `mask`, `cls`, `sep` are ids, or None where there is none.

    >>> t = Tokenizer.from_wordpiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "head", "##s", "attend"])
    >>> t.encode("Heads attend")
    [2, 5, 6, 7, 3]
    >>> t.decode([2, 5, 6, 7, 3])
    'heads attend'
    """

    def __init__(self, backend: Backend, special: Mapping[str, int | None]) -> None:
        self.backend = backend
        self.special = {name: special.get(name) for name in SPECIAL_TOKEN_NAMES}

    def __len__(self) -> int:
        return self.backend.get_vocab_size()

    def __getattr__(self, name: str) -> int | None:
        if name in SPECIAL_TOKEN_NAMES:
            return self.__dict__["special"][name]
        raise AttributeError(f"a tokenizer has no {name!r}")

    @property
    def end_id(self) -> int | None:
        """What stands behind a text: the end token, or what parts two texts."""
        return self.special["eos"] if self.special["eos"] is not None else self.special["sep"]

    @cached_property
    def template_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is put before and behind a text: ([CLS],) and ([SEP],) for BERT."""
        plain_ids, wrapped_ids = self.encode("a", add_special_tokens=False), self.encode("a")
        for start in range(len(wrapped_ids) - len(plain_ids) + 1):
            if wrapped_ids[start : start + len(plain_ids)] == plain_ids:
                return tuple(wrapped_ids[:start]), tuple(wrapped_ids[start + len(plain_ids) :])
        return (), ()

    @property
    def suffix_ids_with_eos(self) -> tuple[int, ...]:
        """What closes a text that is to be written: what is put behind it, and the end token last."""
        suffix = self.template_ids[1]
        return suffix if self.end_id is None or suffix[-1:] == (self.end_id,) else (*suffix, self.end_id)

    def wrap_pair(
        self, source_ids: Sequence[int], target_ids: Sequence[int], decoder_start_token: int
    ) -> tuple[list[int], list[int]]:
        """A pair, its ids without what is put around them, as an encoder-decoder reads it: the source, and the text behind
        the token a decoder starts from. Both end with the end token, whether the tokenizer puts it there or not."""
        prefix, suffix = self.template_ids[0], self.suffix_ids_with_eos
        return [*prefix, *source_ids, *suffix], [decoder_start_token, *prefix, *target_ids, *suffix]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; `add_special_tokens` adds what the model expects around it ([CLS] … [SEP], a start token)."""
        return self.encoding(text, add_special_tokens).ids

    def decode(self, ids: Sequence[int], keep_special_tokens: bool = False) -> str:
        """The text of ids; special tokens are left out unless asked for."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=not keep_special_tokens)

    def token(self, id: int) -> str:
        """How one id is written in the vocabulary."""
        token = self.backend.id_to_token(int(id))
        if token is None:
            raise HeadwiseError(f"there is no token {id}; the vocabulary has {len(self)}.")
        return token

    def align(self, text: str, words: Sequence[str] | None = None, add_special_tokens: bool = True) -> Alignment:
        """Tokens, words and characters of a text; `words` are those given, in order, or found by spaces and marks."""
        encoding = self.encoding(text, add_special_tokens)
        spans = [trim_leading_space(text, span) for span in encoding.offsets]
        return Alignment.of(text, encoding.ids, encoding.tokens, spans, words)

    def encode_without_special_tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, without special tokens."""
        check_lone_surrogates(texts)
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encoding(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Ids, tokens and character offsets of a text, as the `tokenizers` library gives them."""
        check_lone_surrogates([text])
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def save(self, folder: Path | str) -> None:
        """Write tokenizer.json, and tokenizer_config.json with the special tokens: what transformers reads, too."""
        folder = Path(folder)
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        token_texts = {f"{name}_token": self.token(id) for name, id in self.special.items() if id is not None}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **token_texts}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    @staticmethod
    def load(path: Path | str) -> "Tokenizer":
        """Read a folder with tokenizer.json or vocab.txt, or one of those files."""
        return Tokenizer.deferred_load(path)()

    @staticmethod
    def deferred_load(path: Path | str) -> "Callable[[], Tokenizer]":
        """Read the files now and make the tokenizer when called: reading is quick, making is not."""
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        if path.is_dir():
            candidates = [path / name for name in ("tokenizer.json", "vocab.txt") if (path / name).is_file()]
            if not candidates:
                raise HeadwiseError(f"there is no tokenizer in {path}; it needs tokenizer.json or vocab.txt.")
            path = candidates[0]
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        text = _read_text(path)
        if path.suffix == ".txt":
            vocab = text.removesuffix("\n").split("\n")  # only there: a piece may be any other line end of Unicode's
            return partial(Tokenizer.from_wordpiece, vocab, bool(config.get("do_lower_case", True)))
        return partial(_from_json, text, config, path)

    @staticmethod
    def from_wordpiece(vocab: Sequence[str], lowercase: bool = True) -> "Tokenizer":
        """BERT's: a list of pieces, those inside a word marked with ##."""
        piece_ids = {piece: i for i, piece in enumerate(vocab)}
        missing = [name for name in ("[UNK]", "[CLS]", "[SEP]") if name not in piece_ids]
        if missing:
            raise HeadwiseError(
                f"the WordPiece vocabulary lacks {', '.join(missing)}; is it a vocab.txt of BERT's kind?"
            )
        backend = Backend(models.WordPiece(piece_ids, unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
        backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)  # pyright: ignore
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore
        backend.decoder = decoders.WordPiece()  # pyright: ignore
        cls, sep = piece_ids["[CLS]"], piece_ids["[SEP]"]
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", cls), ("[SEP]", sep)]
        )
        backend.add_special_tokens(
            [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in piece_ids]
        )
        names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        return Tokenizer(backend, {key: piece_ids.get(name) for key, name in names.items()})


def check_lone_surrogates(texts: Iterable[str]) -> None:
    """Raise if a text has a lone surrogate, half of a character, which no tokenizer reads.

    >>> check_lone_surrogates([f"caf{chr(0xD800)}"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    headwise.errors.HeadwiseError: a text has the lone surrogate U+D800 at character 3, which is not valid ...
    """
    for text in texts:
        if not text.isascii() and (match := SURROGATE.search(text)):
            raise HeadwiseError(
                f"a text has the lone surrogate U+{ord(match[0]):04X} at character {match.start()}, which is not valid "
                f"Unicode. Replace it first: text.encode('utf-8', 'replace').decode()."
            )


def trim_leading_space(text: str, span: tuple[int, int]) -> tuple[int, int]:
    """A byte-level token's span takes in the space before it; the word it belongs to begins behind."""
    start, end = span
    while start < end and text[start].isspace():
        start += 1
    return (start, end) if start < end else span


def _from_json(text: str, config: Mapping[str, Any], path: Path) -> Tokenizer:
    """A tokenizer.json, with the special tokens that Hugging Face's configuration files name."""
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises bare Exceptions
        raise HeadwiseError(f"{path} is not a tokenizer the tokenizers library reads: {error}") from None
    backend.no_padding()
    backend.no_truncation()
    ids = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = config.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        ids[name] = backend.token_to_id(token) if isinstance(token, str) else None
    return Tokenizer(backend, ids)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise HeadwiseError(f"{path} is not UTF-8: {error}.") from None


def _read_json(path: Path) -> dict[str, Any]:
    """What a configuration file says, as far as it says anything; nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise HeadwiseError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise HeadwiseError(f"{path} must hold a JSON object, got {type(data).__name__}.")
    return {key: value for key, value in data.items() if value is not None}
