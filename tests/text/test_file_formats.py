"""Text files of every format: streamed, equal texts for every compression, and errors for damaged files."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.text import file_formats
from headwise.text.file_formats import file_kind, read_corpus_file

zstandard = pytest.importorskip("zstandard")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = ["One text.", "Zwei Sätze.\nIn two lines.", "  漢字 and 🙂  ", "x" * 5000]
LINES = "".join(json.dumps({"id": i, "text": text, "url": "a"}) + "\n" for i, text in enumerate(TEXTS)).encode()


def zstd_frames(data: bytes) -> bytes:
    """Return several concatenated frames, as `cat a.zst b.zst` gives."""
    pack = zstandard.ZstdCompressor().compress
    return b"".join(pack(data[start : start + 100]) for start in range(0, len(data), 100))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd_frames}


def texts_of(path: Any) -> list[str]:
    return [item.text for item in hw.Corpus.of(path).items()]


def write_parquet(path: Path, columns: dict[str, list], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


@pytest.mark.parametrize("pack", COMPRESSORS)
def test_read_json_lines_for_every_compression(pack: str, tmp_path: Path) -> None:
    path = tmp_path / f"web.jsonl{pack}"
    path.write_bytes(COMPRESSORS[pack](LINES))
    assert texts_of(path) == TEXTS
    assert texts_of(str(path)) == TEXTS, "the string is recognized as a path"


@pytest.mark.parametrize("pack", COMPRESSORS)
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_read_plain_text_for_every_compression(
    pack: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_formats, "READ_BYTES", block)
    monkeypatch.setattr(file_formats, "COMPRESSED_READ_BYTES", 11)
    path = tmp_path / f"a.txt{pack}"
    path.write_bytes(COMPRESSORS[pack]("\n".join(TEXTS).encode()))
    assert "".join(texts_of(path)) == "\n".join(TEXTS)


def test_read_parquet_uses_text_column(tmp_path: Path) -> None:
    path = write_parquet(
        tmp_path / "a.parquet", {"id": [1, 2, 3, 4], "text": TEXTS, "url": ["u"] * 4}, row_group_size=3
    )
    assert texts_of(path) == TEXTS
    other = write_parquet(tmp_path / "b.parquet", {"id": [1, 2, 3, 4], "content": TEXTS})
    assert texts_of(other) == TEXTS, "the only column of strings"


def test_corpus_of_dataset_reads_text_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"n": i, "text": text} for i, text in enumerate(TEXTS)]
    listed = datasets.Dataset.from_list(rows)
    streamed = datasets.IterableDataset.from_generator(lambda: iter(rows))
    corpora = [hw.Corpus.of(dataset) for dataset in (listed, streamed)]
    for corpus in corpora:
        assert [piece.text for piece in corpus.items()] == [piece.text for piece in corpus.items()] == TEXTS
    assert corpora[0].fingerprint == corpora[1].fingerprint != hw.Corpus.of(listed.select(range(3))).fingerprint
    with pytest.raises(HeadwiseError, match="choose one"):
        hw.Corpus.of(datasets.DatasetDict({"train": listed}))
    with pytest.raises(HeadwiseError, match="the dataset, row 1: the text of the row was not found"):
        hw.Corpus.of(datasets.Dataset.from_list([{"n": 1}]))


def test_corpus_of_folder_reads_all_formats_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "a.txt.zst").write_bytes(zstd_frames(b"first"))
    write_parquet(tmp_path / "c.parquet", {"text": ["last"]})
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / "notes.tar.gz").write_bytes(b"whatever")
    corpus = hw.Corpus.of(tmp_path)
    assert texts_of(tmp_path) == ["first", *TEXTS, "last"]
    assert [file.name for file in corpus.files] == ["a.txt.zst", "b.jsonl.gz", "c.parquet"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.txt", ".txt"), ("a.jsonl.zst", ".jsonl"), ("a.parquet", ".parquet"), ("a.parquet.gz", None), ("a.gz", None),
     ("a.tar.gz", None), ("a.pdf", None), ("a.json", None), ("a.conllu", ".conllu"), ("a.conllu.gz", None)],
)  # fmt: skip
def test_file_kind_follows_suffix(name: str, kind: str | None) -> None:
    assert file_kind(Path(name)) == kind


@pytest.mark.parametrize("name", ["a.pdf", "a.csv", "a.tar.gz", "a.parquet.zst"])
def test_corpus_of_unknown_format_raises(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"something")
    with pytest.raises(HeadwiseError, match=r"format is not supported.*\.jsonl.*\.parquet"):
        hw.Corpus.of(tmp_path / name)


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "gzip cut off": ("a.jsonl.gz", gzip.compress(LINES)[:-9], "damaged or truncated"),
    "gzip of nothing": ("a.txt.gz", b"plain text after all", "damaged or truncated"),
    "gzip with a flipped bit": (
        "a.txt.gz",
        gzip.compress(LINES)[:40] + b"\xff\xff" + gzip.compress(LINES)[42:],
        "damaged",
    ),
    "zstd cut off": ("a.jsonl.zst", zstd_frames(LINES)[:-3], "damaged or truncated"),
    "zstd cut off at once": ("a.txt.zst", zstd_frames(LINES)[:3], "damaged or truncated"),
    "zstd of nothing": ("a.txt.zst", b"plain text after all", "damaged or truncated"),
    "no parquet": ("a.parquet", b"plain text after all", "not a parquet file, or it is damaged"),
    "no JSON": ("a.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not valid JSON"),
    "no text": (
        "a.jsonl",
        b'{"text": "a"}\n{"a": "b", "c": "d"}\n',
        "line 2: the text of the row was not found.*'a', 'c'",
    ),
    "a number": ("a.jsonl", b'{"text": 5}\n', "line 1: the text of the row was not found"),
    "Latin": ("a.jsonl", b'{"text": "caf\xe9"}\n', "line 1: not UTF-8"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_read_damaged_file_raises(damage: str, tmp_path: Path) -> None:
    name, data, message = BROKEN[damage]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(HeadwiseError, match=message) as caught:
        texts_of(tmp_path / name)
    assert name in str(caught.value)


def test_read_damaged_parquet_raises(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": [f"some text {i} {i * i}" for i in range(2000)]})
    data = bytearray(path.read_bytes())
    data[20:2000] = bytes(1980)
    path.write_bytes(data)
    with pytest.raises(HeadwiseError, match=r"a\.parquet"):
        texts_of(path)
    for columns, message in (({"n": [1]}, "text column was not found.*'n'"), ({"a": ["x"], "b": ["y"]}, "'a', 'b'")):
        with pytest.raises(HeadwiseError, match=message):
            texts_of(write_parquet(tmp_path / "b.parquet", columns))
    with pytest.raises(HeadwiseError, match=r"b\.parquet, row 2: the text of the row was not found"):
        texts_of(write_parquet(tmp_path / "b.parquet", {"text": ["a", None]}))
    with pytest.raises(HeadwiseError, match="is empty"):
        texts_of(write_parquet(tmp_path / "b.parquet", {"text": pyarrow.array([], pyarrow.string())}))


def test_read_without_optional_package_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", {"text": ["a"]})
    (tmp_path / "a.txt.zst").write_bytes(zstd_frames(b"a"))
    for name, missing in (("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")):
        monkeypatch.setitem(__import__("sys").modules, missing, None)
        with pytest.raises(HeadwiseError, match=rf"{missing} package: pip install 'headwise\[corpora\]'"):
            texts_of(tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt.zst"])
def test_read_large_file_uses_little_memory(name: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [" ".join(str(rng.randrange(10**6)) for _ in range(300)) for _ in range(200)]
    pack = gzip.open if name.endswith("gz") else zstandard.open
    if name.endswith("parquet"):
        schema = pyarrow.schema([("text", pyarrow.string())])
        with parquet.ParquetWriter(tmp_path / name, schema) as writer:
            for _ in range(100):
                writer.write_table(pyarrow.table({"text": texts}, schema))
    else:
        with pack(tmp_path / name, "wt", encoding="utf-8") as file:
            for _ in range(100):
                rng.shuffle(texts)
                file.writelines((json.dumps({"text": text}) if "jsonl" in name else text) + "\n" for text in texts)
    list(zip(range(2), read_corpus_file(tmp_path / name), strict=False))  # one-time allocations of the library

    def work() -> None:
        assert sum(len(item.text) for item in read_corpus_file(tmp_path / name)) > 40e6

    assert peak_memory(work) < 25
