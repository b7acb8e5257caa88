"""Corpora from all sources: complete texts in order, in chunks that do not change them."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.experiments.engine.peak_process_memory import peak_memory
from headwise.text import Corpus, Tokenizer, file_formats
from headwise.text.build_tokenizers import bpe_tokenizer, byte_tokenizer, character_tokenizer
from headwise.text.file_formats import read_text_chunks

SAMPLE = "the theory of the thing, thin  things\n\nand   then\tsome\r\nmore: don't 12 345\n" * 20
CHARACTERS = " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u2028\u3000\ufeffabthe'.,1é漢🙂\u0301"


def texts_of(source: Any) -> list[str]:
    """Return the texts of a corpus, with the chunks of long texts joined."""
    texts, open_text = [], ""
    for piece in Corpus.of(source).chunks():
        open_text += piece.text
        if piece.ends_text:
            texts.append(open_text)
            open_text = ""
    assert open_text == ""
    return texts


# Sources of texts.


def test_corpus_of_texts_lists_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.text").write_text("third")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / "README").write_text("bare")
    assert texts_of("one two") == ["one two"]
    assert texts_of(["one", "two"]) == ["one", "two"]
    assert texts_of(text for text in ("one", "two")) == ["one", "two"]
    assert texts_of(tmp_path / "b.txt") == ["second"]
    assert texts_of(str(tmp_path / "b.txt")) == ["second"]
    assert texts_of(tmp_path / "README") == ["bare"]
    assert texts_of(tmp_path) == ["first", "second", "third"]
    assert texts_of([tmp_path / "b.txt", tmp_path / "a.md"]) == ["second", "first"]
    assert texts_of([tmp_path / "deep", tmp_path / "a.md"]) == ["third", "first"]
    again = Corpus.of(tmp_path)
    assert list(again.chunks()) == list(again.chunks())  # can be read repeatedly
    assert Corpus.of(again) is again


def test_corpus_of_generator_can_be_read_repeatedly() -> None:
    corpus = Corpus.of(text for text in ("one", "two"))
    assert [piece.text for piece in corpus.chunks()] == [piece.text for piece in corpus.chunks()] == ["one", "two"]


def test_corpus_of_relations_file_yields_texts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"words": ["the", "cat"], "relations": []}\n{"words": ["sat"], "relations": []}\n'
    )
    assert texts_of(tmp_path / "a.jsonl") == ["the cat", "sat"]


@pytest.mark.parametrize("suffix", [".pdf", ".TXTX", ".json", ".bin"])
def test_corpus_of_unsupported_file_raises(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"file{suffix}").write_text("some text")
    with pytest.raises(HeadwiseError, match=r"format is not supported.*\.txt"):
        Corpus.of(tmp_path / f"file{suffix}")


def test_corpus_of_missing_or_empty_input_raises(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match=r"nowhere\.txt: file or folder not found"):
        Corpus.of(tmp_path / "nowhere.txt")
    with pytest.raises(HeadwiseError, match="file or folder not found"):
        Corpus.of("nowhere.txt")
    with pytest.raises(HeadwiseError, match="no text in the folder"):
        Corpus.of(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(HeadwiseError, match=r"empty\.txt: the file is empty"):
        Corpus.of(tmp_path / "empty.txt")
    with pytest.raises(HeadwiseError, match=r"empty\.txt: the file is empty"):
        Corpus.of(tmp_path)
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(HeadwiseError, match="empty"):
        list(Corpus.of(tmp_path / "mark.txt").chunks())
    for nothing in ("", [], [""]):
        with pytest.raises(HeadwiseError, match="empty"):
            list(Corpus.of(nothing).chunks())


@pytest.mark.parametrize("wrong", [5, b"bytes", ["one", Path("two.txt")], [1, 2], 3.5])
def test_corpus_of_wrong_type_raises(wrong: Any) -> None:
    with pytest.raises(HeadwiseError, match="corpus: must be a text"):
        Corpus.of(wrong)


def test_corpus_fingerprint_changes_with_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    texts: list[Any] = ["ab", ["ab"], ["a", "b"], ["b", "a"], "ba", ["ab", ""]]
    assert len({Corpus.of(text).fingerprint for text in texts}) >= len(texts) - 1  # a single text equals a list of one
    fingerprints = set()
    for text in ("x" * 100, "x" * 99 + "y", "y" + "x" * 99, "x" * 101, "x" * 300_000, "x" * 299_999 + "y"):
        path.write_text(text)
        fingerprints.add(Corpus.of(path).fingerprint)
    assert len(fingerprints) == 6


def test_corpus_fingerprint_detects_change_inside_long_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 300_000)
    before = Corpus.of(path).fingerprint
    path.write_text("x" * 150_000 + "y" + "x" * 149_999)
    assert Corpus.of(path).fingerprint != before


# Files that are not UTF-8.


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("line", [1, 2, 37])
def test_corpus_invalid_utf8_raises_with_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: int, mark: bytes, block: int
) -> None:
    monkeypatch.setattr(file_formats, "READ_BYTES", block)
    path = tmp_path / "latin.txt"
    path.write_bytes(mark + "ä line\n".encode() * (line - 1) + b"caf\xe9 at last\n" + b"more\n" * 10)
    with pytest.raises(HeadwiseError, match=rf"latin\.txt, line {line}: byte 0xe9 is not UTF-8"):
        list(Corpus.of(path).chunks())


def test_corpus_truncated_character_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_formats, "READ_BYTES", 5)
    (tmp_path / "cut.txt").write_bytes(b"one\ntwo\nthr\xe6\xbc")
    with pytest.raises(HeadwiseError, match=r"cut\.txt, line 3: byte 0xe6"):
        list(Corpus.of(tmp_path / "cut.txt").chunks())


# Chunks.

TOKENIZERS: dict[str, Tokenizer] = {
    "byte": byte_tokenizer(),
    "character": character_tokenizer(SAMPLE + CHARACTERS),
    "bpe": bpe_tokenizer([SAMPLE], 400),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(CHARACTERS, min_size=1, max_size=120), block=st.integers(1, 9), mark=st.booleans())
def test_read_text_chunks_keep_text_and_tokens(
    name: str, text: str, block: int, mark: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_formats, "READ_BYTES", block)
    path = tmp_path / "a.txt"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + text.encode())
    pieces = list(read_text_chunks(path))
    expected = text if mark else text.removeprefix("\ufeff")  # a byte order mark is not part of the text
    assert "".join(piece.text for piece in pieces) == expected
    assert [piece.ends_text for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    tokenizer = TOKENIZERS[name]
    ids = [id for piece in pieces for id in tokenizer.encode(piece.text, add_special_tokens=False)]
    assert ids == tokenizer.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_read_text_long_file_is_chunked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(file_formats, "READ_BYTES", 100)
    path = tmp_path / "a.txt"
    path.write_bytes(f"a line of some words{end}".encode() * 200)
    max_chunk = max(len(piece.text) for piece in read_text_chunks(path))
    assert max_chunk < 400


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_corpus_large_file_uses_little_memory(tmp_path: Path, end: str) -> None:
    path = tmp_path / "long.txt"
    line = f"a line of some words, and a few more of them{end}".encode()
    with open(path, "wb") as file:
        for _ in range(50):
            file.write(line * ((1 << 20) // len(line)))

    def work() -> None:
        assert sum(len(piece.text) for piece in Corpus.of(path).chunks()) == os.path.getsize(path)

    assert peak_memory(work) < 15
