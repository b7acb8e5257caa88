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
from headwise.text.documents import Document
from headwise.text.file_formats import Piece, in_folders, kind_of, known_kinds, read_stored, read_text, text_of


class Pair(NamedTuple):
    """What an encoder-decoder reads, and what it is asked to write."""

    source: str
    text: str


@runtime_checkable
class HasCorpus(Protocol):
    """What is made of a corpus, as a reading is: it stands for it."""

    corpus: "Corpus"


@dataclass(frozen=True)
class Corpus:
    """Texts, one after the other, as often as asked. `fingerprint` changes when they do.

    >>> corpus = Corpus.of(["One text.", "Another."])
    >>> [piece.text for piece in corpus.pieces()]
    ['One text.', 'Another.']
    >>> Corpus.little(documents=2).name
    'the little language (train, 2 documents, seed 0)'
    >>> list(Corpus.of([("Guten Tag.", "Good day.")]).items())
    [Pair(source='Guten Tag.', text='Good day.')]
    """

    name: str
    fingerprint: str
    _read: Callable[[], Iterator[Piece | Document | Pair]] = field(repr=False)
    paired: bool = False  # whether its items are pairs
    files: tuple[Path, ...] = ()  # where they lie, in order, if they do in files and nowhere else

    def items(self) -> Iterator[Piece | Document | Pair]:
        """What is read: documents where there are relations, pairs for an encoder-decoder, else pieces of text."""
        empty = True
        for item in self._read():
            empty = empty and not item.text
            yield item
        if empty:
            raise HeadwiseError(f"{self.name} is empty; give some text.")

    def pieces(self) -> Iterator[Piece]:
        """The texts, long ones in pieces cut where lines end; of a pair first the source, then the text."""
        for item in self.items():
            if isinstance(item, Piece):
                yield item
                continue
            if isinstance(item, Pair):
                yield Piece(item.source, True)
            yield Piece(item.text, True)

    def suits(self, kind: str) -> None:
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
    def of(given: Any) -> "Corpus":
        """A text, a list of texts, documents or pairs, a path or several, a corpus, or a dataset of Hugging Face's
        `datasets`, streaming or not; None is the embedded probe set.

        A string that names a file or a folder is a path, any other is a text.
        """
        if given is None:
            return Corpus.probe()
        if isinstance(given, Corpus):
            return given
        if isinstance(given, HasCorpus):
            return given.corpus
        if type(given).__module__.partition(".")[0] == "datasets":
            return Corpus._of_rows(given)
        if isinstance(given, Path) or (isinstance(given, str) and _is_path(given)):
            return Corpus._of_path(Path(given))
        if not isinstance(given, str | Iterable):
            raise HeadwiseError(f"a corpus is a text, a list of texts or a path; got {given!r}.")
        items = [given] if isinstance(given, str) else list(given)
        paths = [item for item in items if isinstance(item, Path)]
        if paths and len(paths) == len(items):
            return Corpus._joined([Corpus._of_path(path) for path in paths])
        documents = [item for item in items if isinstance(item, Document)]
        if documents and len(documents) == len(items):
            name = f"a list of {len(documents)} documents"
            return Corpus(name, _digest(*map(repr, documents)), lambda: iter(documents))
        if items and all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
            return Corpus.pairs(*map(list, zip(*items, strict=True)))
        texts = [item for item in items if isinstance(item, str)]
        if len(texts) < len(items):
            raise HeadwiseError(f"a corpus is a text, a list of texts or a path; got {given!r}.")
        name = "the text" if isinstance(given, str) else f"a list of {len(texts)} texts"
        return Corpus(name, _digest(*texts), lambda: (Piece(text, True) for text in texts))

    @staticmethod
    def little(split: str = "train", *, documents: int = 20_000, seed: int = 0) -> "Corpus":
        """So many documents of the little language."""
        from headwise.text.synthetic import LittleLanguage
        from headwise.text.synthetic.splits import check_split

        check_split(split)
        if documents < 1:
            raise HeadwiseError(f"the number of documents must be at least 1, got {documents}.")
        name = f"the little language ({split}, {documents} documents, seed {seed})"
        return Corpus(name, _digest(name), lambda: islice(LittleLanguage(seed, split), documents))

    @staticmethod
    def probe() -> "Corpus":
        """The embedded probe set: hand-written English sentences with gold relations."""
        from headwise.text.probe import probe_set

        documents = probe_set()
        return Corpus("the probe set", _digest(*(d.text for d in documents)), lambda: iter(documents))

    @staticmethod
    def pairs(sources: str | Path | Sequence[str], texts: str | Path | Sequence[str]) -> "Corpus":
        """What an encoder-decoder reads and what it is asked to write: two files, line by line, or two lists."""
        sources, texts = (given if isinstance(given, str | Path) else list(given) for given in (sources, texts))
        counts = [sum(1 for _ in _lines(given)) for given in (sources, texts)]
        if counts[0] != counts[1]:
            raise HeadwiseError(
                f"there are {counts[0]} sources and {counts[1]} texts; each source needs its text, line by line."
            )

        def read() -> Iterator[Pair]:
            for number, pair in enumerate(zip(_lines(sources), _lines(texts), strict=True), 1):
                if not all(isinstance(text, str) and text.strip() for text in pair):
                    raise HeadwiseError(
                        f"pair {number} lacks a text: {pair!r}; leave it out on both sides, or give two files, "
                        f"Corpus.pairs(sources, texts)."
                    )
                yield Pair(*pair)

        name = " and ".join(str(given) for given in (sources, texts) if isinstance(given, str | Path))
        sides = (
            _digest_of([Path(given)]) if isinstance(given, str | Path) else _digest(*map(str, given))
            for given in (sources, texts)
        )
        return Corpus(name or f"a list of {counts[0]} pairs", _digest(*sides), read, paired=True)

    @staticmethod
    def named(texts: Sequence[str | Path] | None, source: Path | None = None) -> "Corpus":
        """What is named on a command line: nothing, a text, or files; with a source, the pairs it makes with one file."""
        if source is not None:
            if not texts or len(texts) > 1:
                raise HeadwiseError(
                    f"a source belongs to one file, what an encoder-decoder shall write; got {len(texts or ())} files."
                )
            return Corpus.pairs(source, Path(texts[0]))
        return Corpus.of(texts[0] if texts and len(texts) == 1 else [Path(text) for text in texts] if texts else None)

    @staticmethod
    def _joined(parts: "list[Corpus]") -> "Corpus":
        name = ", ".join(part.name for part in parts)
        files = tuple(file for part in parts for file in part.files)
        made = _digest(*(part.fingerprint for part in parts))
        return Corpus(name, made, lambda: (i for p in parts for i in p._read()), files=files)

    @staticmethod
    def _of_path(path: Path) -> "Corpus":
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.is_file() and in_folders(f))
            if not files:
                raise HeadwiseError(f"there is no text in the folder {path}; known kinds of files: {known_kinds()}.")
        elif path.is_file():
            files = [path]
        else:
            raise HeadwiseError(f"there is no file or folder {path}.")
        for file in files:
            if kind_of(file) is None:
                raise HeadwiseError(
                    f"{file} is not a kind of file that is read here; known: {known_kinds()}; as one of two files of pairs, "
                    f"any."
                )
            if file.stat().st_size == 0:
                raise HeadwiseError(f"{file} is empty; give a file with some text.")
        read = partial(map, read_stored, files)
        return Corpus(str(path), _digest_of(files), lambda: chain.from_iterable(read()), files=tuple(files))

    @staticmethod
    def _of_rows(given: Iterable[Any]) -> "Corpus":
        """A dataset: rows with a text each, read again whenever asked."""

        def read() -> Iterator[Piece]:
            for number, row in enumerate(given, 1):
                if not isinstance(row, Mapping):
                    raise HeadwiseError(
                        f"a dataset has rows with a text each; got {row!r}. Of several splits choose one: dataset['train']."
                    )
                yield Piece(text_of(row, f"the dataset, row {number}"), True)

        made = hashlib.sha256()
        for piece in read():
            made.update(f"{len(piece.text)}:{piece.text}".encode("utf-8", "surrogatepass"))
        name = getattr(getattr(given, "info", None), "dataset_name", None)
        return Corpus(f"the dataset {name}" if name else "the dataset", made.hexdigest(), read)


def _lines(given: str | Path | Sequence[str]) -> Iterator[str]:
    """The lines of a file, or those given."""
    if not isinstance(given, str | Path):
        yield from given
        return
    if not Path(given).is_file():
        raise HeadwiseError(f"there is no file {given}; pairs are two files, line by line, or two lists.")
    waiting = ""
    for piece in read_text(Path(given)):
        *lines, waiting = (waiting + piece.text).split("\n")
        yield from (line.removesuffix("\r") for line in lines)
    if waiting:
        yield waiting


def _is_path(given: str) -> bool:
    """Whether a string means a path: there is such a file, or it looks like nothing else."""
    if not given or "\n" in given or "\0" in given:
        return False
    if os.path.exists(given):  # says no to a text too long for a name, where Path would complain
        return True
    return not any(c.isspace() for c in given) and (bool(kind_of(Path(given))) or "/" in given)


def _digest(*texts: str) -> str:
    made = hashlib.sha256()
    for text in texts:
        made.update(f"{len(text)}:".encode())
        made.update(text.encode("utf-8", "surrogatepass"))
    return made.hexdigest()


def _digest_of(files: list[Path]) -> str:
    made = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            made.update(
                f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}".encode("utf-8", "surrogateescape")
            )
    return made.hexdigest()
