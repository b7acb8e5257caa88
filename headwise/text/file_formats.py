"""Read text files: plain text, JSON Lines and parquet, compressed or not, in chunks."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from headwise.errors import FileFormatError, MissingDependencyError
from headwise.text.annotated_document import Document
from headwise.text.annotated_documents import parse_json_document, read_documents

PLAIN_TEXT_SUFFIXES = (".txt", ".text", ".md", "")
JSONL_SUFFIX, PARQUET_SUFFIX = ".jsonl", ".parquet"  # one text per line, or per row
TREEBANK_SUFFIXES = (".conllu", ".tsv")  # documents with relations
COMPRESSED_SUFFIXES = (".gz", ".zst")
READ_BYTES = 1 << 20  # bytes per read
COMPRESSED_READ_BYTES = 1 << 12  # bytes per read of a zstd file, which are decompressed at once
PARQUET_BATCH_ROWS = 256  # rows per read


class TextChunk(NamedTuple):
    """A part of a text.

    Attributes:
        text: The text.
        ends_text: Whether this is the last chunk of a text. A long file has many chunks.
    """

    text: str
    ends_text: bool


def file_kind(path: Path) -> str | None:
    """Return the format of a file by its name, `.txt` for `a.txt.gz`. None if it is not supported.

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
    """Return whether a file in a folder is part of its corpus. Treebanks and files without suffix must be named."""
    return file_kind(path) not in (None, "", *TREEBANK_SUFFIXES)


def describe_file_kinds() -> str:
    """Return the supported formats for an error message."""
    compressed = ", ".join(f"{JSONL_SUFFIX}{suffix}" for suffix in COMPRESSED_SUFFIXES)
    texts, others = (*PLAIN_TEXT_SUFFIXES[:-1], JSONL_SUFFIX), (PARQUET_SUFFIX, *TREEBANK_SUFFIXES)
    return f"{', '.join(texts)} (also compressed: {compressed}), {', '.join(others)}"


def read_corpus_file(path: Path) -> Iterator[TextChunk | Document]:
    """Yield the texts of a file, or its documents if it has relations."""
    kind = file_kind(path)
    if kind == JSONL_SUFFIX:
        return _read_jsonl(path)
    if kind == PARQUET_SUFFIX:
        return _read_parquet(path)
    return read_documents(path) if kind in TREEBANK_SUFFIXES else read_text_chunks(path)


def read_text_chunks(path: Path) -> Iterator[TextChunk]:
    """Yield a UTF-8 file of any length in chunks that end at line ends."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    lines, pending = 1, ""
    with open_decompressed(path) as file:
        while True:
            block = file.read(READ_BYTES)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line = lines + pending.count("\n") + error.object[: error.start].count(b"\n")
                raise FileFormatError(
                    f"{path}, line {line}: byte {error.object[error.start]:#04x} is not UTF-8. Convert the file to UTF-8."
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
    """Open a file and decompress it while reading. Raise if it is damaged."""
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
            raise FileFormatError(
                f"{path}: the file is damaged or truncated ({error}). Download or compress it again."
            ) from None


class _ZstdStream(io.RawIOBase):
    """Bytes of a zstd file with one or several frames. Unlike the stream of the library, it raises at a truncated frame."""

    def __init__(self, file: BinaryIO, make_decompressor: Callable[[], Any]) -> None:
        self.file, self.make_decompressor = file, make_decompressor
        self.frame: Any = None
        self.pending = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer. Return their number, 0 at the end."""
        while not self.pending:
            compressed = self.file.read(COMPRESSED_READ_BYTES)
            if not compressed:
                if self.frame is not None:
                    raise EOFError("truncated frame")
                return 0
            self.frame = self.frame or self.make_decompressor()
            self.pending = self.frame.decompress(compressed)
            if self.frame.eof:  # the remaining bytes belong to the next frame
                self.file.seek(-len(self.frame.unused_data), io.SEEK_CUR)
                self.frame = None
        count = min(len(buffer), len(self.pending))
        buffer[:count], self.pending = self.pending[:count], self.pending[count:]
        return count


def _import_zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError(
            f"{path}: reading it needs the zstandard package: pip install 'headwise[corpora]'."
        ) from None
    return zstandard


# One text per line or row.


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
                raise FileFormatError(f"{location}: not UTF-8. Convert the file to UTF-8.") from None
            except json.JSONDecodeError as error:
                raise FileFormatError(f"{location}: not valid JSON ({error.msg}). Correct the line.") from None
            has_relations = not isinstance(row, dict) or "words" in row
            yield parse_json_document(row, location) if has_relations else TextChunk(row_text(row, location), True)
    if line_number == 0:
        raise FileFormatError(f"{path}: the file is empty. It needs at least one line.")


def row_text(row: Mapping[str, Any], location: str) -> str:
    """Return the text of a row: its field `text`, or its only string.

    >>> row_text({"id": 3, "text": "One.", "url": "…"}, "a.jsonl, line 1"), row_text({"content": "One."}, "")
    ('One.', 'One.')
    """
    strings = [name for name, value in row.items() if isinstance(value, str)]
    name = "text" if "text" in row else strings[0] if len(strings) == 1 else None
    if name is None or not isinstance(row[name], str):
        columns = ", ".join(map(repr, row)) or "nothing"
        raise FileFormatError(
            f"{location}: the text of the row was not found. It must be a string in the field `text`, or the only string of "
            f"the row. Got the fields: {columns}. Name the text field `text`. "
            'Documents with relations need {"words": […], "relations": [["name", from, to], …]}.'
        )
    return row[name]


def _read_parquet(path: Path) -> Iterator[TextChunk]:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise MissingDependencyError(
            f"{path}: reading it needs the pyarrow package: pip install 'headwise[corpora]'."
        ) from None
    row_number = 0
    try:
        with ParquetFile(path) as file:
            schema = file.schema_arrow
            strings = [
                f.name for f in schema if pyarrow.types.is_string(f.type) or pyarrow.types.is_large_string(f.type)
            ]
            name = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
            if name is None:
                raise FileFormatError(
                    f"{path}: the text column was not found. It must be a string column named `text`, or the only string "
                    f"column. Got the columns: {', '.join(map(repr, schema.names))}. Name the text column `text`."
                )
            for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=[name]):
                for text in batch.column(0).to_pylist():
                    row_number += 1
                    yield TextChunk(row_text({name: text}, f"{path}, row {row_number}"), True)
    except (pyarrow.ArrowException, OSError) as error:
        raise FileFormatError(
            f"{path}: it is not a parquet file, or it is damaged ({error}). Download or write it again."
        ) from None
    if row_number == 0:
        raise FileFormatError(f"{path}: the file is empty. It needs at least one row.")


def _find_split(text: str) -> int:
    """Return a position before white space at which splitting does not change tokens: a line end after a letter or digit,
    otherwise the end of a word."""
    for separator in ("\n", " "):
        position = len(text)
        while (position := text.rfind(separator, 1, position)) > 0:
            split = position - 1 if separator == "\n" and text[position - 1] == "\r" else position
            if split and text[split - 1].isalnum():
                return split
    return 0
