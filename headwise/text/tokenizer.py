"""Tokenizers, through the `tokenizers` library: from tokenizer.json, a WordPiece vocabulary or GGUF metadata."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tokenizers import Encoding, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headwise.errors import ArgumentError, FileFormatError
from headwise.text.token_alignment import Alignment

SURROGATE = re.compile("[\ud800-\udfff]")
SPECIAL_TOKEN_NAMES = ("bos", "eos", "pad", "unk", "mask", "cls", "sep")


class Tokenizer:
    """Converts text to token ids and back.

    Attributes:
        backend: The tokenizer of the `tokenizers` library.
        special: Ids of the special tokens bos, eos, pad, unk, mask, cls and sep, or None. They are also attributes, such as
            `tokenizer.eos`.

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
        raise AttributeError(f"Tokenizer has no attribute {name!r}")

    @property
    def end_id(self) -> int | None:
        """Id of the token that ends a text: eos, else sep, else None."""
        return self.special["eos"] if self.special["eos"] is not None else self.special["sep"]

    @cached_property
    def template_ids(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Special tokens that `encode` adds before and after a text: ([CLS],) and ([SEP],) for BERT."""
        plain_ids, wrapped_ids = self.encode("a", add_special_tokens=False), self.encode("a")
        for start in range(len(wrapped_ids) - len(plain_ids) + 1):
            if wrapped_ids[start : start + len(plain_ids)] == plain_ids:
                return tuple(wrapped_ids[:start]), tuple(wrapped_ids[start + len(plain_ids) :])
        return (), ()

    @property
    def suffix_ids_with_eos(self) -> tuple[int, ...]:
        """Special tokens after a text, with the end token as the last."""
        suffix = self.template_ids[1]
        return suffix if self.end_id is None or suffix[-1:] == (self.end_id,) else (*suffix, self.end_id)

    def wrap_pair(
        self, source_ids: Sequence[int], target_ids: Sequence[int], decoder_start_token: int
    ) -> tuple[list[int], list[int]]:
        """Add the special tokens of an encoder-decoder to a source and a text.

        Args:
            source_ids: Ids of the source, without special tokens.
            target_ids: Ids of the text, without special tokens.
            decoder_start_token: Id of the token that starts the decoder.

        Returns:
            Ids of the source and of the text. Both end with the end token.
        """
        prefix, suffix = self.template_ids[0], self.suffix_ids_with_eos
        return [*prefix, *source_ids, *suffix], [decoder_start_token, *prefix, *target_ids, *suffix]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            add_special_tokens: Add the special tokens of the model ([CLS] … [SEP], or a BOS token).

        Returns:
            Token ids.

        Raises:
            ArgumentError: If the text has a lone surrogate.
        """
        return self.encoding(text, add_special_tokens).ids

    def decode(self, ids: Sequence[int], keep_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Args:
            ids: Token ids.
            keep_special_tokens: Keep special tokens in the text.

        Returns:
            The text.
        """
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=not keep_special_tokens)

    def token(self, id: int) -> str:
        """Return the string of a token in the vocabulary."""
        token = self.backend.id_to_token(int(id))
        if token is None:
            raise ArgumentError(f"id: no such token. Got {id}. Use an id from 0 to {len(self) - 1}.")
        return token

    def align(self, text: str, words: Sequence[str] | None = None, add_special_tokens: bool = True) -> Alignment:
        """Align the tokens of a text with its words.

        Args:
            text: The text.
            words: Words in the order of the text. None splits the text at spaces and punctuation.
            add_special_tokens: Add the special tokens of the model.

        Returns:
            Tokens, words and their character spans.
        """
        encoding = self.encoding(text, add_special_tokens)
        spans = [trim_leading_space(text, span) for span in encoding.offsets]
        return Alignment.of(text, encoding.ids, encoding.tokens, spans, words)

    def encode_without_special_tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of several texts, without special tokens."""
        check_lone_surrogates(texts)
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encoding(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Return ids, tokens and character offsets of a text as an `Encoding` of the `tokenizers` library."""
        check_lone_surrogates([text])
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def save(self, folder: Path | str) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers can read, into a folder."""
        folder = Path(folder)
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        token_texts = {f"{name}_token": self.token(id) for name, id in self.special.items() if id is not None}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **token_texts}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    @staticmethod
    def load(path: Path | str) -> "Tokenizer":
        """Load a tokenizer.

        Args:
            path: A folder with tokenizer.json or vocab.txt, or one of these files.

        Returns:
            The tokenizer.

        Raises:
            FileFormatError: If the tokenizer is missing or damaged.
        """
        return Tokenizer.deferred_load(path)()

    @staticmethod
    def deferred_load(path: Path | str) -> "Callable[[], Tokenizer]":
        """Read the files of a tokenizer now, and return a function that builds it, because building is slow."""
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        if path.is_dir():
            candidates = [path / name for name in ("tokenizer.json", "vocab.txt") if (path / name).is_file()]
            if not candidates:
                raise FileFormatError(
                    f"{path}: no tokenizer in this folder. It needs tokenizer.json or vocab.txt. Add one of them."
                )
            path = candidates[0]
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        text = _read_text(path)
        if path.suffix == ".txt":
            vocab = text.removesuffix("\n").split("\n")  # only at \n: other Unicode line ends may be tokens
            from headwise.text.smiles_tokenization import (  # which imports this module
                is_smiles_vocabulary,
                smiles_tokenizer,
            )

            if is_smiles_vocabulary(vocab):
                return partial(smiles_tokenizer, vocab)
            return partial(Tokenizer.from_wordpiece, vocab, bool(config.get("do_lower_case", True)))
        return partial(_from_json, text, config, path)

    @staticmethod
    def from_wordpiece(vocab: Sequence[str], lowercase: bool = True) -> "Tokenizer":
        """Return a BERT tokenizer.

        Args:
            vocab: Pieces in the order of their ids. Pieces inside a word start with ##.
            lowercase: Lowercase the text first.

        Returns:
            The tokenizer.
        """
        piece_ids = {piece: i for i, piece in enumerate(vocab)}
        missing = [name for name in ("[UNK]", "[CLS]", "[SEP]") if name not in piece_ids]
        if missing:
            raise FileFormatError(
                f"vocab: the WordPiece vocabulary lacks {', '.join(missing)}. Use the vocab.txt of a BERT model."
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
    """Raise if a text has a lone surrogate, half of a character, which no tokenizer supports.

    >>> check_lone_surrogates([f"caf{chr(0xD800)}"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    headwise.errors.ArgumentError: text: it has the lone surrogate U+D800 at character 3, which is not valid ...
    """
    for text in texts:
        if not text.isascii() and (match := SURROGATE.search(text)):
            raise ArgumentError(
                f"text: it has the lone surrogate U+{ord(match[0]):04X} at character {match.start()}, which is not valid "
                f"Unicode. Replace it first: text.encode('utf-8', 'replace').decode()."
            )


def trim_leading_space(text: str, span: tuple[int, int]) -> tuple[int, int]:
    """Remove the leading space from the span of a byte-level token, so that it starts with its word."""
    start, end = span
    while start < end and text[start].isspace():
        start += 1
    return (start, end) if start < end else span


def _from_json(text: str, config: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, with the special tokens of the Hugging Face config files."""
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises bare Exceptions
        raise FileFormatError(
            f"{path}: it is not a tokenizer of the tokenizers library ({error}). Check or replace the file."
        ) from None
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
        raise FileFormatError(f"{path}: it is not UTF-8 ({error}). Convert the file to UTF-8.") from None


def _read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a config file without null values. Empty if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise FileFormatError(f"{path}: it is not valid JSON ({error}). Correct or remove the file.") from None
    if not isinstance(data, dict):
        raise FileFormatError(
            f"{path}: it must contain a JSON object. Got {type(data).__name__}. Correct or remove the file."
        )
    return {key: value for key, value in data.items() if value is not None}
