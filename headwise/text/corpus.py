"""What is read: a text, a list of texts, files, folders, a dataset, or something embedded. Read in pieces, never whole."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from headwise.errors import HeadwiseError
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
    """What an encoder-decoder reads, and what it is asked to write."""

    source: str
    text: str


@runtime_checkable
class SupportsCorpus(Protocol):
    """What is made of a corpus, as a reading is: it stands for it."""

    corpus: "Corpus"


@dataclass(frozen=True)
class Corpus:
    """Texts, one after the other, as often as asked. `fingerprint` changes when they do.

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
    paired: bool = False  # whether its items are pairs
    files: tuple[Path, ...] = ()  # where they lie, in order, if they do in files and nowhere else

    @property
    def description(self) -> str:
        """The name and the start of the fingerprint, as plans state them."""
        return f"{self.name} ({self.fingerprint[:12]})"

    def items(self) -> Iterator[TextChunk | Document | TextPair]:
        """What is read: documents where there are relations, pairs for an encoder-decoder, else pieces of text."""
        empty = True
        for item in self._iterate():
            empty = empty and not item.text
            yield item
        if empty:
            raise HeadwiseError(f"{self.name} is empty; give some text.")

    def chunks(self) -> Iterator[TextChunk]:
        """The texts, long ones in pieces cut where lines end; of a pair first the source, then the text."""
        for item in self.items():
            if isinstance(item, TextChunk):
                yield item
                continue
            if isinstance(item, TextPair):
                yield TextChunk(item.source, True)
            yield TextChunk(item.text, True)

    def check_model_kind(self, kind: str) -> None:
        """Refuse a corpus that a model of this kind cannot be trained on, or asked about."""
        if self.paired and kind != "encoder-decoder":
            raise HeadwiseError(
                f"pairs of a source and a text are for an encoder-decoder; give this {kind} texts alone."
            )
        if not self.paired and kind == "encoder-decoder":
            raise HeadwiseError(
                "an encoder-decoder writes a text that belongs to a source, so it needs pairs: [(source, text), …], or two "
                "files, Corpus.pairs(sources, texts), on the command line TEXT and --source."
            )

    @staticmethod
    def of(data: Any) -> "Corpus":
        """A text, a list of texts, documents or pairs, a path or several, a corpus, or a dataset of Hugging Face's
        `datasets`, streaming or not; None is the embedded probe set.

        A string that names a file or a folder is a path, any other is a text.
        """
        if data is None:
            return Corpus.probe_set()
        if isinstance(data, Corpus):
            return data
        if isinstance(data, SupportsCorpus):
            return data.corpus
        if type(data).__module__.partition(".")[0] == "datasets":
            return Corpus._from_dataset(data)
        if isinstance(data, Path) or (isinstance(data, str) and _is_path(data)):
            return Corpus._from_path(Path(data))
        if not isinstance(data, str | Iterable):
            raise HeadwiseError(f"a corpus is a text, a list of texts or a path; got {data!r}.")
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
            raise HeadwiseError(f"a corpus is a text, a list of texts or a path; got {data!r}.")
        name = "the text" if isinstance(data, str) else f"a list of {len(texts)} texts"
        return Corpus(name, _texts_digest(*texts), lambda: (TextChunk(text, True) for text in texts))

    @staticmethod
    def synthetic(split: str = "train", *, documents: int = 20_000, seed: int = 0) -> "Corpus":
        """So many documents of the synthetic language."""
        from headwise.text.synthetic import SyntheticLanguage
        from headwise.text.synthetic.word_pair_splits import check_split

        check_split(split)
        if documents < 1:
            raise HeadwiseError(f"the number of documents must be at least 1, got {documents}.")
        name = f"the synthetic language ({split}, {documents} documents, seed {seed})"
        return Corpus(name, _texts_digest(name), lambda: islice(SyntheticLanguage(seed, split), documents))

    @staticmethod
    def probe_set() -> "Corpus":
        """The embedded probe set: hand-written English sentences with gold relations."""
        from headwise.text.probe import probe_set

        documents = probe_set()
        return Corpus("the probe set", _texts_digest(*(d.text for d in documents)), lambda: iter(documents))

    @staticmethod
    def pairs(sources: str | Path | Sequence[str], texts: str | Path | Sequence[str]) -> "Corpus":
        """What an encoder-decoder reads and what it is asked to write: two files, line by line, or two lists."""
        sources, texts = (side if isinstance(side, str | Path) else list(side) for side in (sources, texts))
        counts = [sum(1 for _ in _iter_lines(side)) for side in (sources, texts)]
        if counts[0] != counts[1]:
            raise HeadwiseError(
                f"there are {counts[0]} sources and {counts[1]} texts; each source needs its text, line by line."
            )

        def read() -> Iterator[TextPair]:
            for index, pair in enumerate(zip(_iter_lines(sources), _iter_lines(texts), strict=True), 1):
                if not all(isinstance(text, str) and text.strip() for text in pair):
                    raise HeadwiseError(
                        f"pair {index} lacks a text: {pair!r}; leave it out on both sides, or give two files, "
                        f"Corpus.pairs(sources, texts)."
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
        """What is named on a command line: nothing, a text, or files; with a source, the pairs it makes with one file."""
        if source is not None:
            if not texts or len(texts) > 1:
                raise HeadwiseError(
                    f"a source belongs to one file, what an encoder-decoder shall write; got {len(texts or ())} files."
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
                raise HeadwiseError(
                    f"there is no text in the folder {path}; known kinds of files: {describe_file_kinds()}."
                )
        elif path.is_file():
            files = [path]
        else:
            raise HeadwiseError(f"there is no file or folder {path}.")
        for file in files:
            if file_kind(file) is None:
                raise HeadwiseError(
                    f"{file} is not a kind of file that is read here; known: {describe_file_kinds()}; as one of two files "
                    f"of pairs, any."
                )
            if file.stat().st_size == 0:
                raise HeadwiseError(f"{file} is empty; give a file with some text.")
        iterate_files = partial(map, read_corpus_file, files)
        return Corpus(str(path), _files_digest(files), lambda: chain.from_iterable(iterate_files()), files=tuple(files))

    @staticmethod
    def _from_dataset(dataset: Iterable[Any]) -> "Corpus":
        """A dataset: rows with a text each, read again whenever asked."""

        def read() -> Iterator[TextChunk]:
            for index, row in enumerate(dataset, 1):
                if not isinstance(row, Mapping):
                    raise HeadwiseError(
                        f"a dataset has rows with a text each; got {row!r}. Of several splits choose one: dataset['train']."
                    )
                yield TextChunk(row_text(row, f"the dataset, row {index}"), True)

        hasher = hashlib.sha256()
        for chunk in read():
            hasher.update(f"{len(chunk.text)}:{chunk.text}".encode("utf-8", "surrogatepass"))
        name = getattr(getattr(dataset, "info", None), "dataset_name", None)
        return Corpus(f"the dataset {name}" if name else "the dataset", hasher.hexdigest(), read)


def _iter_lines(source: str | Path | Sequence[str]) -> Iterator[str]:
    """The lines of a file, or those given."""
    if not isinstance(source, str | Path):
        yield from source
        return
    if not Path(source).is_file():
        raise HeadwiseError(f"there is no file {source}; pairs are two files, line by line, or two lists.")
    pending = ""
    for chunk in read_text_chunks(Path(source)):
        *lines, pending = (pending + chunk.text).split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    if pending:
        yield pending


def _is_path(text: str) -> bool:
    """Whether a string means a path: there is such a file, or it looks like nothing else."""
    if not text or "\n" in text or "\0" in text:
        return False
    if os.path.exists(text):  # says no to a text too long for a name, where Path would complain
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
