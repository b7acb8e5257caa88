"""Metadata of GGUF files, beside gguf's own reader."""

from pathlib import Path

import numpy as np
import pytest

import headwise as hw
from headwise.io.weight_readers import GGUFReader

gguf = pytest.importorskip("gguf")
WORDS = ["", "a", "naïve ▁ 東", "x" * 300, "end"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a file with lists of strings and numbers, strings and a tensor."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_array("tokenizer.ggml.tokens", WORDS)
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_string("general.name", "after the lists")
    writer.add_uint32("llama.block_count", 7)
    writer.add_tensor("weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_fields_equal_those_of_gguf(file: Path) -> None:
    fields = GGUFReader(file).fields()
    expected = {name: field.contents() for name, field in gguf.GGUFReader(str(file)).fields.items()}
    assert fields == expected
    assert fields["tokenizer.ggml.tokens"] == WORDS


def test_tensor_after_string_lists_is_read(file: Path) -> None:
    assert GGUFReader(file).get("weight").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("name", ["tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
@pytest.mark.parametrize("count", [1 << 40, 100])
def test_string_list_longer_than_the_file_raises(file: Path, name: str, count: int) -> None:
    data = bytearray(file.read_bytes())
    start = data.index(name.encode()) + len(name) + 8  # after the types of the list and of its items
    data[start : start + 8] = count.to_bytes(8, "little")
    file.write_bytes(data)
    with pytest.raises(hw.HeadwiseError, match="not a GGUF file, or truncated"):
        GGUFReader(file)


@pytest.mark.parametrize("size", [30, 60, 120, 200, 400])
def test_truncated_file_raises(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(hw.HeadwiseError, match="not a GGUF file, or truncated"):
        GGUFReader(file)


def test_string_that_is_not_utf8_raises(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"a b", b"a\xff\xfe"))
    with pytest.raises(hw.HeadwiseError, match="not a GGUF file, or truncated"):
        GGUFReader(file)
