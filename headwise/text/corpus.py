"""Corpora: a text, a list of texts, files, folders, a dataset or an embedded corpus. Texts are read in chunks."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from headwise.errors import ArgumentError, FileFormatError
from headwise.text.annotated_document import Document
from headwise.text.file_formats import (
    TextChunk,
    describe_file_kinds,
    file_kind,
    is_included_in_folder_corpus,
    read_corpus_file,
    read_text_chunks,
    row_text,
)


class TextPair(NamedTuple):
    """A source text and a target text of an encoder-decoder.

    Attributes:
        source: Input of the encoder.
        text: Text that the decoder generates.
    """

    source: str
    text: str


@runtime_checkable
class CorpusHolder(Protocol):
    """An object that was made from a corpus, such as a TokenizedCorpus, and can be passed instead of it."""

    corpus: "Corpus"


@dataclass(frozen=True)
class Corpus:
    """A sequence of texts that can be read repeatedly.

    Attributes:
        name: Name for messages.
        fingerprint: Digest that changes with the texts.
        paired: Whether the items are pairs of a source and a text.
        files: Files of the corpus in order. Empty if it does not come from files.

    >>> corpus = Corpus.of(["One text.", "Another."])
    >>> [piece.text for piece in corpus.chunks()]
    ['One text.', 'Another.']
    >>> Corpus.synthetic(documents=2).name
    'the synthetic language (train, 2 documents, seed 0)'
    >>> list(Corpus.of([("Guten Tag.", "Good day.")]).items())
    [TextPair(source='Guten Tag.', text='Good day.')]
    """

    name: str
    fingerprint: str
    _iterate: Callable[[], Iterator[TextChunk | Document | TextPair]] = field(repr=False)
    paired: bool = False
    files: tuple[Path, ...] = ()

    @property
    def description(self) -> str:
        """Name and start of the fingerprint, as stored in plans."""
        return f"{self.name} ({self.fingerprint[:12]})"

    def items(self) -> Iterator[TextChunk | Document | TextPair]:
        """Yield documents with relations, pairs for an encoder-decoder, or chunks of text.

        Raises:
            ArgumentError: If all texts are empty.
        """
        empty = True
        for item in self._iterate():
            empty = empty and not item.text
            yield item
        if empty:
            raise ArgumentError(f"corpus: {self.name} is empty. Give some text.")

    def chunks(self) -> Iterator[TextChunk]:
        """Yield the texts. Long texts are split into chunks at line ends. A pair yields its source, then its text."""
        for item in self.items():
            if isinstance(item, TextChunk):
                yield item
                continue
            if isinstance(item, TextPair):
                yield TextChunk(item.source, True)
            yield TextChunk(item.text, True)

    def check_model_kind(self, kind: str) -> None:
        """Raise if a model of this kind cannot use the corpus.

        Args:
            kind: "decoder", "encoder" or "encoder-decoder".
        """
        if self.paired and kind != "encoder-decoder":
            raise ArgumentError(
                "corpus: pairs of a source and a text are supported only by an encoder-decoder. "
                f"Got a model of kind {kind}. Give it texts alone."
            )
        if not self.paired and kind == "encoder-decoder":
            raise ArgumentError(
                "corpus: an encoder-decoder needs pairs of a source and a text. Got texts. Use [(source, text), …], or two "
                "files: Corpus.pairs(sources, texts); on the command line, TEXT and --source."
            )

    @staticmethod
    def of(data: Any) -> "Corpus":
        """Make a corpus from texts, documents, pairs, paths or a dataset.

        Args:
            data: A text, a list of texts, documents or pairs, a path or several, a Corpus, or a Hugging Face dataset,
                streaming or not. A string that names a file or a folder is a path, any other string is a text. None: the
                embedded probe set.

        Returns:
            The corpus. Files are read when it is iterated.

        Raises:
            ArgumentError: If the data are of another type.
            FileFormatError: If a file does not exist, is empty or has an unknown format.
        """
        if data is None:
            return Corpus.probe_set()
        if isinstance(data, Corpus):
            return data
        if isinstance(data, CorpusHolder):
            return data.corpus
        if type(data).__module__.partition(".")[0] == "datasets":
            return Corpus._from_dataset(data)
        if isinstance(data, Path) or (isinstance(data, str) and _is_path(data)):
            return Corpus._from_path(Path(data))
        if not isinstance(data, str | Iterable):
            raise ArgumentError(
                f"corpus: must be a text, a list of texts or a path. Got {data!r}. Pass a string or a list."
            )
        items = [data] if isinstance(data, str) else list(data)
        paths = [item for item in items if isinstance(item, Path)]
        if paths and len(paths) == len(items):
            return Corpus._concatenate([Corpus._from_path(path) for path in paths])
        documents = [item for item in items if isinstance(item, Document)]
        if documents and len(documents) == len(items):
            name = f"a list of {len(documents)} documents"
            return Corpus(name, _texts_digest(*map(repr, documents)), lambda: iter(documents))
        if items and all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
            return Corpus.pairs(*map(list, zip(*items, strict=True)))
        texts = [item for item in items if isinstance(item, str)]
        if len(texts) < len(items):
            raise ArgumentError(
                f"corpus: must be a text, a path or a list. Got {data!r}. The items of a list must be all strings, all "
                f"paths, all documents or all pairs (source, text)."
            )
        name = "the text" if isinstance(data, str) else f"a list of {len(texts)} texts"
        return Corpus(name, _texts_digest(*texts), lambda: (TextChunk(text, True) for text in texts))

    @staticmethod
    def synthetic(split: str = "train", *, documents: int = 20_000, seed: int = 0) -> "Corpus":
        """Return documents of the synthetic language.

        Args:
            split: "train", or "held-out" for word pairs that never occur in training.
            documents: Number of documents.
            seed: Seed of the documents.

        Returns:
            A corpus of documents with gold relations.
        """
        from headwise.text.synthetic import SyntheticLanguage
        from headwise.text.synthetic.word_pair_splits import check_split

        check_split(split)
        if documents < 1:
            raise ArgumentError(f"documents: must be at least 1. Got {documents}. Use documents=1000, for example.")
        name = f"the synthetic language ({split}, {documents} documents, seed {seed})"
        return Corpus(name, _texts_digest(name), lambda: islice(SyntheticLanguage(seed, split), documents))

    @staticmethod
    def probe_set() -> "Corpus":
        """Return the embedded probe set: hand-written English sentences with gold relations."""
        from headwise.text.probe import probe_set

        documents = probe_set()
        return Corpus("the probe set", _texts_digest(*(d.text for d in documents)), lambda: iter(documents))

    @staticmethod
    def pairs(sources: str | Path | Sequence[str], texts: str | Path | Sequence[str]) -> "Corpus":
        """Return pairs of a source and a text for an encoder-decoder.

        Args:
            sources: A file with one source per line, or a list of sources.
            texts: A file with one text per line, or a list of texts, as many as sources.

        Returns:
            A corpus of pairs.

        Raises:
            ArgumentError: If the numbers of sources and texts differ.
        """
        sources, texts = (side if isinstance(side, str | Path) else list(side) for side in (sources, texts))
        counts = [sum(1 for _ in _iter_lines(side)) for side in (sources, texts)]
        if counts[0] != counts[1]:
            raise ArgumentError(
                f"sources, texts: each source needs a text on the same line. Got {counts[0]} sources and {counts[1]} texts. "
                "Add or remove lines so that the numbers agree."
            )

        def read() -> Iterator[TextPair]:
            for index, pair in enumerate(zip(_iter_lines(sources), _iter_lines(texts), strict=True), 1):
                if not all(isinstance(text, str) and text.strip() for text in pair):
                    raise ArgumentError(
                        f"corpus: pair {index} needs a source and a text, two strings that are not empty. Got {pair!r}. "
                        f"Remove the pair. To read pairs from two files, use Corpus.pairs(sources, texts)."
                    )
                yield TextPair(*pair)

        name = " and ".join(str(side) for side in (sources, texts) if isinstance(side, str | Path))
        digests = (
            _files_digest([Path(side)]) if isinstance(side, str | Path) else _texts_digest(*map(str, side))
            for side in (sources, texts)
        )
        return Corpus(name or f"a list of {counts[0]} pairs", _texts_digest(*digests), read, paired=True)

    @staticmethod
    def from_cli_arguments(texts: Sequence[str | Path] | None, source: Path | None = None) -> "Corpus":
        """Return the corpus of command-line arguments.

        Args:
            texts: A text or files. None: the probe set.
            source: File of sources, which makes pairs with the file in `texts`.

        Returns:
            The corpus.
        """
        if source is not None:
            if not texts or len(texts) > 1:
                raise ArgumentError(
                    f"source: a file of source texts needs exactly one file of target texts. Got {len(texts or ())} files of "
                    f"target texts. Give one: TEXT with --source, --test with --test-source, or --valid with --valid-source."
                )
            return Corpus.pairs(source, Path(texts[0]))
        return Corpus.of(texts[0] if texts and len(texts) == 1 else [Path(text) for text in texts] if texts else None)

    @staticmethod
    def _concatenate(corpora: "list[Corpus]") -> "Corpus":
        name = ", ".join(corpus.name for corpus in corpora)
        files = tuple(file for corpus in corpora for file in corpus.files)
        fingerprint = _texts_digest(*(corpus.fingerprint for corpus in corpora))
        return Corpus(
            name, fingerprint, lambda: (item for corpus_part in corpora for item in corpus_part._iterate()), files=files
        )

    @staticmethod
    def _from_path(path: Path) -> "Corpus":
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.is_file() and is_included_in_folder_corpus(f))
            if not files:
                raise FileFormatError(
                    f"{path}: no text in the folder. Add files of a supported format: {describe_file_kinds()}."
                )
        elif path.is_file():
            files = [path]
        else:
            raise FileFormatError(f"{path}: file or folder not found. Check the path.")
        for file in files:
            if file_kind(file) is None:
                raise FileFormatError(
                    f"{file}: the file format is not supported. Use one of {describe_file_kinds()}. Files of pairs may have "
                    "any suffix: Corpus.pairs(sources, texts)."
                )
            if file.stat().st_size == 0:
                raise FileFormatError(f"{file}: the file is empty. Give a file with text.")
        iterate_files = partial(map, read_corpus_file, files)
        return Corpus(str(path), _files_digest(files), lambda: chain.from_iterable(iterate_files()), files=tuple(files))

    @staticmethod
    def _from_dataset(dataset: Iterable[Any]) -> "Corpus":
        """Return the corpus of a Hugging Face dataset. Rows are read again in each iteration."""

        def read() -> Iterator[TextChunk]:
            for index, row in enumerate(dataset, 1):
                if not isinstance(row, Mapping):
                    raise ArgumentError(
                        f"corpus: rows of a dataset must be mappings. Got {row!r}. If the dataset has several splits, "
                        "choose one: dataset['train']."
                    )
                yield TextChunk(row_text(row, f"the dataset, row {index}"), True)

        hasher = hashlib.sha256()
        for chunk in read():
            hasher.update(f"{len(chunk.text)}:{chunk.text}".encode("utf-8", "surrogatepass"))
        name = getattr(getattr(dataset, "info", None), "dataset_name", None)
        return Corpus(f"the dataset {name}" if name else "the dataset", hasher.hexdigest(), read)


def _iter_lines(source: str | Path | Sequence[str]) -> Iterator[str]:
    """Yield the lines of a file, or the given lines."""
    if not isinstance(source, str | Path):
        yield from source
        return
    if not Path(source).is_file():
        raise FileFormatError(
            f"{source}: file not found. Corpus.pairs(sources, texts) takes two files, in which equal line numbers form a "
            f"pair, or two lists of texts. Check the path."
        )
    pending = ""
    for chunk in read_text_chunks(Path(source)):
        *lines, pending = (pending + chunk.text).split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    if pending:
        yield pending


def _is_path(text: str) -> bool:
    """Return whether a string is a path: it exists, or it has a known suffix or a slash and no spaces."""
    if not text or "\n" in text or "\0" in text:
        return False
    if os.path.exists(text):  # returns False for names that are too long, for which Path raises
        return True
    return not any(c.isspace() for c in text) and (bool(file_kind(Path(text))) or "/" in text)


def _texts_digest(*texts: str) -> str:
    hasher = hashlib.sha256()
    for text in texts:
        hasher.update(f"{len(text)}:".encode())
        hasher.update(text.encode("utf-8", "surrogatepass"))
    return hasher.hexdigest()


def _files_digest(files: list[Path]) -> str:
    hasher = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            hasher.update(
                f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}".encode("utf-8", "surrogateescape")
            )
    return hasher.hexdigest()
