"""Files of texts: plain, JSON Lines, parquet, compressed or not. Read in pieces; none is ever held whole."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from headwise.errors import HeadwiseError
from headwise.text.documents import Document
from headwise.text.treebank import document_of, read_documents

PLAIN = (".txt", ".text", ".md", "")  # files of plain text
LINES, PARQUET = ".jsonl", ".parquet"  # a text in each line, in each row
RELATED = (".conllu", ".tsv")  # files of documents with relations
PACKED = (".gz", ".zst")
BLOCK = 1 << 20  # bytes read at once
PACKED_BLOCK = 1 << 12  # and of a zstd file: they may hold many times as many, and come all at once
ROWS = 256  # of a table


class Piece(NamedTuple):
    """Some text, and whether a text ends with it: a long file comes in many pieces."""

    text: str
    ends: bool


def kind_of(path: Path) -> str | None:
    """What is in a file by its name, `.txt` in `a.txt.gz`; None: nothing that is read here.

    >>> kind_of(Path("web.jsonl.zst")), kind_of(Path("README")), kind_of(Path("photo.png"))
    ('.jsonl', '', None)
    """
    suffix = path.with_suffix("").suffix if path.suffix in PACKED else path.suffix
    packs = path.suffix not in PACKED or suffix in (*PLAIN[:-1], LINES)
    return suffix if packs and suffix in (*PLAIN, LINES, PARQUET, *RELATED) else None


def in_folders(path: Path) -> bool:
    """Whether a file is read where it lies in a folder: texts are; treebanks and files without a suffix are named singly."""
    return kind_of(path) not in (None, "", *RELATED)


def known_kinds() -> str:
    """The kinds of files, for a message."""
    packed = ", ".join(f"{LINES}{suffix}" for suffix in PACKED)
    return f"{', '.join((*PLAIN[:-1], LINES))} (also packed: {packed}), {', '.join((PARQUET, *RELATED))}"


def read_stored(path: Path) -> Iterator[Piece | Document]:
    """The texts of a file, one after the other; documents where it has relations."""
    kind = kind_of(path)
    if kind == LINES:
        return _of_lines(path)
    if kind == PARQUET:
        return _of_parquet(path)
    return read_documents(path) if kind in RELATED else read_text(path)


def read_text(path: Path) -> Iterator[Piece]:
    """A UTF-8 file, however long, in pieces cut where a line ends."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines, waiting = 1, ""
    with opened(path) as file:
        while True:
            block = file.read(BLOCK)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line = lines + waiting.count("\n") + error.object[: error.start].count(b"\n")
                raise HeadwiseError(
                    f"{path}, line {line}: byte {error.object[error.start]:#04x} is not UTF-8; convert the file first."
                ) from None
            if not block:
                yield Piece(waiting + text, True)
                return
            waiting += text
            cut = _cut(waiting)
            if cut:
                lines += waiting.count("\n", 0, cut)
                yield Piece(waiting[:cut], False)
                waiting = waiting[cut:]


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, unpacked while they are read; a damaged one is told."""
    broken: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
    with open(path, "rb") as file:
        stream: Any = file
        if path.suffix == ".gz":
            stream = gzip.GzipFile(fileobj=file)
        elif path.suffix == ".zst":
            zstandard = _zstandard(path)
            broken = (*broken, zstandard.ZstdError)
            stream = io.BufferedReader(_Unpacked(file, zstandard.ZstdDecompressor().decompressobj), BLOCK)
        try:
            yield stream
        except broken as error:
            raise HeadwiseError(f"{path} is damaged or cut off ({error}); fetch or pack it again.") from None


class _Unpacked(io.RawIOBase):
    """The bytes in a zstd file, which may have several frames. One that ends in the middle is told: the library's own stream
    would end there in silence."""

    def __init__(self, file: BinaryIO, start: Callable[[], Any]) -> None:
        self.file, self.start = file, start
        self.frame: Any = None
        self.waiting = b""

    def readable(self) -> bool:
        """It is read, not written."""
        return True

    def readinto(self, into: Any) -> int:
        """The next bytes, as many as there is room for or fewer; 0 at the end."""
        while not self.waiting:
            packed = self.file.read(PACKED_BLOCK)
            if not packed:
                if self.frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self.frame = self.frame or self.start()
            self.waiting = self.frame.decompress(packed)
            if self.frame.eof:  # what is left belongs to the next frame
                self.file.seek(-len(self.frame.unused_data), io.SEEK_CUR)
                self.frame = None
        count = min(len(into), len(self.waiting))
        into[:count], self.waiting = self.waiting[:count], self.waiting[count:]
        return count


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise HeadwiseError(f"{path} needs the zstandard package: pip install 'headwise[corpora]'.") from None
    return zstandard


# A text in each line or row.


def _of_lines(path: Path) -> Iterator[Piece | Document]:
    number = 0
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                raise HeadwiseError(f"{where}: not UTF-8; convert the file first.") from None
            except json.JSONDecodeError as error:
                raise HeadwiseError(f"{where}: not valid JSON: {error.msg}.") from None
            related = not isinstance(row, dict) or "words" in row
            yield document_of(row, where) if related else Piece(text_of(row, where), True)
    if number == 0:
        raise HeadwiseError(f"{path} is empty; it needs at least one line.")


def text_of(row: Mapping[str, Any], where: str) -> str:
    """The text of a row: what it calls `text`, or else its only string.

    >>> text_of({"id": 3, "text": "One.", "url": "…"}, "a.jsonl, line 1"), text_of({"content": "One."}, "")
    ('One.', 'One.')
    """
    strings = [name for name, value in row.items() if isinstance(value, str)]
    name = "text" if "text" in row else strings[0] if len(strings) == 1 else None
    if name is None or not isinstance(row[name], str):
        there = ", ".join(map(repr, row)) or "nothing"
        raise HeadwiseError(
            f"{where}: which is the text? A row has a string `text`, or one string alone; this has {there}. Documents with "
            f'relations have {{"words": […], "relations": [["name", from, to], …]}}.'
        )
    return row[name]


def _of_parquet(path: Path) -> Iterator[Piece]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise HeadwiseError(f"{path} needs the pyarrow package: pip install 'headwise[corpora]'.") from None
    number = 0
    try:
        with ParquetFile(path) as file:
            schema = file.schema_arrow
            strings = [
                f.name for f in schema if pyarrow.types.is_string(f.type) or pyarrow.types.is_large_string(f.type)
            ]
            name = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
            if name is None:
                raise HeadwiseError(
                    f"{path}: which is the text? A table has a column `text` of strings, or one of strings alone; this has "
                    f"{', '.join(map(repr, schema.names))}."
                )
            for batch in file.iter_batches(ROWS, columns=[name]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield Piece(text_of({name: text}, f"{path}, row {number}"), True)
    except (pyarrow.ArrowException, OSError) as error:
        raise HeadwiseError(f"{path} is no parquet file, or is damaged ({error}).") from None
    if number == 0:
        raise HeadwiseError(f"{path} is empty; it needs at least one row.")


def _cut(text: str) -> int:
    """Where a line ends behind a letter or a digit; failing that, where a word does: there, before the white space, tokens
    of the parts are those of the whole."""
    for mark in ("\n", " "):
        place = len(text)
        while (place := text.rfind(mark, 1, place)) > 0:
            edge = place - 1 if mark == "\n" and text[place - 1] == "\r" else place
            if edge and text[edge - 1].isalnum():
                return edge
    return 0
