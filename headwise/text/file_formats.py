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
from headwise.text.annotated_document import Document
from headwise.text.treebank import parse_json_document, read_documents

PLAIN_TEXT_SUFFIXES = (".txt", ".text", ".md", "")  # files of plain text
JSONL_SUFFIX, PARQUET_SUFFIX = ".jsonl", ".parquet"  # a text in each line, in each row
TREEBANK_SUFFIXES = (".conllu", ".tsv")  # files of documents with relations
COMPRESSED_SUFFIXES = (".gz", ".zst")
READ_BYTES = 1 << 20  # bytes read at once
COMPRESSED_READ_BYTES = 1 << 12  # and of a zstd file: they may hold many times as many, and come all at once
PARQUET_BATCH_ROWS = 256  # of a table


class TextChunk(NamedTuple):
    """Some text, and whether a text ends with it: a long file comes in many pieces."""

    text: str
    ends_text: bool


def file_kind(path: Path) -> str | None:
    """What is in a file by its name, `.txt` in `a.txt.gz`; None: nothing that is read here.

    >>> file_kind(Path("web.jsonl.zst")), file_kind(Path("README")), file_kind(Path("photo.png"))
    ('.jsonl', '', None)
    """
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix
    is_readable = path.suffix not in COMPRESSED_SUFFIXES or suffix in (*PLAIN_TEXT_SUFFIXES[:-1], JSONL_SUFFIX)
    return (
        suffix
        if is_readable and suffix in (*PLAIN_TEXT_SUFFIXES, JSONL_SUFFIX, PARQUET_SUFFIX, *TREEBANK_SUFFIXES)
        else None
    )


def is_included_in_folder_corpus(path: Path) -> bool:
    """Whether a file is read where it lies in a folder: texts are; treebanks and files without a suffix are named singly."""
    return file_kind(path) not in (None, "", *TREEBANK_SUFFIXES)


def describe_file_kinds() -> str:
    """The kinds of files, for a message."""
    compressed = ", ".join(f"{JSONL_SUFFIX}{suffix}" for suffix in COMPRESSED_SUFFIXES)
    texts, others = (*PLAIN_TEXT_SUFFIXES[:-1], JSONL_SUFFIX), (PARQUET_SUFFIX, *TREEBANK_SUFFIXES)
    return f"{', '.join(texts)} (also packed: {compressed}), {', '.join(others)}"


def read_corpus_file(path: Path) -> Iterator[TextChunk | Document]:
    """The texts of a file, one after the other; documents where it has relations."""
    kind = file_kind(path)
    if kind == JSONL_SUFFIX:
        return _read_jsonl(path)
    if kind == PARQUET_SUFFIX:
        return _read_parquet(path)
    return read_documents(path) if kind in TREEBANK_SUFFIXES else read_text_chunks(path)


def read_text_chunks(path: Path) -> Iterator[TextChunk]:
    """A UTF-8 file, however long, in pieces cut where a line ends."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines, pending = 1, ""
    with open_decompressed(path) as file:
        while True:
            block = file.read(READ_BYTES)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line = lines + pending.count("\n") + error.object[: error.start].count(b"\n")
                raise HeadwiseError(
                    f"{path}, line {line}: byte {error.object[error.start]:#04x} is not UTF-8; convert the file first."
                ) from None
            if not block:
                yield TextChunk(pending + text, True)
                return
            pending += text
            split_at = _find_split(pending)
            if split_at:
                lines += pending.count("\n", 0, split_at)
                yield TextChunk(pending[:split_at], False)
                pending = pending[split_at:]


@contextmanager
def open_decompressed(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, unpacked while they are read; a damaged one is told."""
    decode_errors: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
    with open(path, "rb") as file:
        stream: Any = file
        if path.suffix == ".gz":
            stream = gzip.GzipFile(fileobj=file)
        elif path.suffix == ".zst":
            zstandard = _import_zstandard(path)
            decode_errors = (*decode_errors, zstandard.ZstdError)
            stream = io.BufferedReader(_ZstdStream(file, zstandard.ZstdDecompressor().decompressobj), READ_BYTES)
        try:
            yield stream
        except decode_errors as error:
            raise HeadwiseError(f"{path} is damaged or cut off ({error}); fetch or pack it again.") from None


class _ZstdStream(io.RawIOBase):
    """The bytes in a zstd file, which may have several frames. One that ends in the middle is told: the library's own stream
    would end there in silence."""

    def __init__(self, file: BinaryIO, make_decompressor: Callable[[], Any]) -> None:
        self.file, self.make_decompressor = file, make_decompressor
        self.frame: Any = None
        self.pending = b""

    def readable(self) -> bool:
        """It is read, not written."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes, as many as there is room for or fewer; 0 at the end."""
        while not self.pending:
            compressed = self.file.read(COMPRESSED_READ_BYTES)
            if not compressed:
                if self.frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self.frame = self.frame or self.make_decompressor()
            self.pending = self.frame.decompress(compressed)
            if self.frame.eof:  # what is left belongs to the next frame
                self.file.seek(-len(self.frame.unused_data), io.SEEK_CUR)
                self.frame = None
        count = min(len(buffer), len(self.pending))
        buffer[:count], self.pending = self.pending[:count], self.pending[count:]
        return count


def _import_zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise HeadwiseError(f"{path} needs the zstandard package: pip install 'headwise[corpora]'.") from None
    return zstandard


# A text in each line or row.


def _read_jsonl(path: Path) -> Iterator[TextChunk | Document]:
    line_number = 0
    with open_decompressed(path) as file:
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            location = f"{path}, line {line_number}"
            try:
                row = json.loads(line.decode("utf-8-sig" if line_number == 1 else "utf-8"))
            except UnicodeDecodeError:
                raise HeadwiseError(f"{location}: not UTF-8; convert the file first.") from None
            except json.JSONDecodeError as error:
                raise HeadwiseError(f"{location}: not valid JSON: {error.msg}.") from None
            has_relations = not isinstance(row, dict) or "words" in row
            yield parse_json_document(row, location) if has_relations else TextChunk(row_text(row, location), True)
    if line_number == 0:
        raise HeadwiseError(f"{path} is empty; it needs at least one line.")


def row_text(row: Mapping[str, Any], location: str) -> str:
    """The text of a row: what it calls `text`, or else its only string.

    >>> row_text({"id": 3, "text": "One.", "url": "…"}, "a.jsonl, line 1"), row_text({"content": "One."}, "")
    ('One.', 'One.')
    """
    strings = [name for name, value in row.items() if isinstance(value, str)]
    name = "text" if "text" in row else strings[0] if len(strings) == 1 else None
    if name is None or not isinstance(row[name], str):
        columns = ", ".join(map(repr, row)) or "nothing"
        raise HeadwiseError(
            f"{location}: which is the text? A row has a string `text`, or one string alone; this has {columns}. "
            f'Documents with relations have {{"words": […], "relations": [["name", from, to], …]}}.'
        )
    return row[name]


def _read_parquet(path: Path) -> Iterator[TextChunk]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise HeadwiseError(f"{path} needs the pyarrow package: pip install 'headwise[corpora]'.") from None
    row_number = 0
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
            for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=[name]):
                for text in batch.column(0).to_pylist():
                    row_number += 1
                    yield TextChunk(row_text({name: text}, f"{path}, row {row_number}"), True)
    except (pyarrow.ArrowException, OSError) as error:
        raise HeadwiseError(f"{path} is no parquet file, or is damaged ({error}).") from None
    if row_number == 0:
        raise HeadwiseError(f"{path} is empty; it needs at least one row.")


def _find_split(text: str) -> int:
    """Where a line ends behind a letter or a digit; failing that, where a word does: there, before the white space, tokens
    of the parts are those of the whole."""
    for separator in ("\n", " "):
        position = len(text)
        while (position := text.rfind(separator, 1, position)) > 0:
            split = position - 1 if separator == "\n" and text[position - 1] == "\r" else position
            if split and text[split - 1].isalnum():
                return split
    return 0
