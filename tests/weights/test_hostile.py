"""Damaged and malicious files: loading raises an error with the reason, executes nothing and returns no partial model."""

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise as hw
from headwise.weights import open_checkpoint
from tests.weights.checkpoints import make_llama, write_gguf

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid checkpoint, to be damaged."""
    make_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    return tmp_path / "model"


def assert_load_raises(source: Path | str, *fragments: str) -> None:
    """Check that loading raises an error that contains all fragments in this order."""
    pattern = ".*".join(re.escape(fragment) for fragment in fragments)
    with pytest.raises(hw.HeadwiseError, match=re.compile(pattern, re.DOTALL)):
        hw.load(source)


def rewrite_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def rewrite_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


# Damaged safetensors.


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 200, -1, -5000])
def test_load_truncated_safetensors_raises(length: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:length])
    assert_load_raises(folder, "model.safetensors: not a valid safetensors file", "Download it again")


def test_load_safetensors_truncated_at_boundaries_raises(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    for length in (end - 1, end, end + 1, (end + len(data)) // 2):
        file.write_bytes(data[:length])
        assert_load_raises(folder, "not a valid safetensors file")
    file.write_bytes(data + b"more")
    assert_load_raises(folder, "not a valid safetensors file")


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def header_entry(start: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "a header as long as the sea": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 10_000) + b"{}",
    "offsets beyond the end": safetensors_bytes({"a": header_entry(0, 2**62, [2**60])}),
    "offsets that run back": safetensors_bytes({"a": header_entry(16, 0, [4])}, bytes(16)),
    "negative offsets": safetensors_bytes({"a": header_entry(-16, 0, [4])}, bytes(16)),
    "a negative size": safetensors_bytes({"a": header_entry(0, 16, [-4])}, bytes(16)),
    "a size that overflows": safetensors_bytes({"a": header_entry(0, 16, [2**63, 2**63])}, bytes(16)),
    "tensors that overlap": safetensors_bytes(
        {"a": header_entry(0, 16, [4]), "b": header_entry(8, 24, [4])}, bytes(24)
    ),
    "tensors with a hole": safetensors_bytes(
        {"a": header_entry(0, 16, [4]), "b": header_entry(20, 36, [4])}, bytes(36)
    ),
    "offsets that do not fit the shape": safetensors_bytes({"a": header_entry(0, 12, [4])}, bytes(12)),
    "a type nobody knows": safetensors_bytes({"a": {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
    "no JSON": safetensors_bytes(b"not json at all"),
    "a list": safetensors_bytes([1, 2]),
    "nested without end": safetensors_bytes(b"[" * 100_000),
    "a pickle": pickle.dumps({"a": 1}),
    "a GGUF": b"GGUF" + bytes(64),
    "zeros": bytes(64),
}


@pytest.mark.parametrize("name", HEADERS)
def test_load_invalid_safetensors_header_raises(name: str, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(HEADERS[name])
    with pytest.raises(hw.HeadwiseError):
        hw.load(folder)


# Pickles.


class Payload:
    """Object of a malicious file: unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize("place", ["top", "value", "name"])
def test_load_torch_file_never_runs_pickle(place: str, old_format: bool, folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it-was-run"
    tensors: Any = load_file(folder / "model.safetensors")
    payload: Any = Payload(marker)
    tensors = (
        payload
        if place == "top"
        else {**tensors, "more": payload}
        if place == "value"
        else {"a": tensors, "b": [payload]}
    )
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format)
    assert_load_raises(folder, "pytorch_model.bin", "which could execute code", "safetensors")
    assert not marker.exists()
    assert pickle.loads(pickle.dumps(payload)) is None  # the payload works
    assert marker.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch warns about the file before it raises an error
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "weights.pt", "model.safetensors"])
def test_load_plain_pickle_is_never_run(name: str, protocol: int, folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it-was-run"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload(marker), protocol))
    if name.startswith("consolidated"):
        (folder / "config.json").unlink()
        (folder / "params.json").write_text(json.dumps({"dim": 96, "n_layers": 2, "n_heads": 6}))
    with pytest.raises(hw.HeadwiseError, match=rf"{re.escape(name)}"):
        hw.load(folder / name if name == "weights.pt" else folder)
    assert not marker.exists()


def test_load_pickled_tokenizer_is_never_run(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_bytes(pickle.dumps(Payload(tmp_path / "it-was-run")))
    with pytest.raises(hw.HeadwiseError, match=r"Convert the file to UTF"):
        hw.load(folder)
    assert not (tmp_path / "it-was-run").exists()


@pytest.mark.parametrize("content", [[torch.zeros(3)], {"a": 3}, {"a": {"b": torch.zeros(1)}}, torch.zeros(2), "text"])
def test_load_torch_file_without_state_dict_raises(content: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    assert_load_raises(folder, "pytorch_model.bin: must contain a state dict")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"\x80\x02", bytes(100), b"hello"])
def test_load_invalid_torch_file_raises(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert_load_raises(folder, "pytorch_model.bin")


def test_load_truncated_torch_file_raises(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    data = (folder / "pytorch_model.bin").read_bytes()
    for length in (10, len(data) // 2, len(data) - 3):
        (folder / "pytorch_model.bin").write_bytes(data[:length])
        assert_load_raises(folder, "pytorch_model.bin")


# NaN and infinite values, wrong shapes.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.uint8])
def test_load_integer_weights_raise(dtype: torch.dtype, folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite_tensors(folder, lambda tensors: tensors.update({name: torch.ones_like(tensors[name]).to(dtype)}))
    assert_load_raises(folder, f"has dtype {dtype}, but weights must be floating-point")


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_load_non_finite_weights_raise(number: float, folder: Path) -> None:
    rewrite_tensors(folder, lambda tensors: tensors["model.layers.1.self_attn.v_proj.weight"][3, 4:6].fill_(number))
    assert_load_raises(folder, "is damaged: blocks.1.attention.qkv.v_weight contains 2 NaN or infinite values")


def test_load_large_weights_pass_and_infinities_raise(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite_tensors(folder, lambda tensors: tensors[name].fill_(3e38))
    assert hw.load(folder).spec.layers == 2  # large but finite values
    rewrite_tensors(folder, lambda tensors: tensors[name].view(-1)[:2].copy_(torch.tensor([torch.inf, -torch.inf])))
    assert_load_raises(folder, "contains 2 NaN or infinite values")


def test_load_lists_missing_extra_and_misshapen_tensors(folder: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        tensors["model.layers.7.surprise"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(95)

    rewrite_tensors(folder, damage)
    assert_load_raises(
        folder,
        "the weights do not match the model's configuration",
        "missing: model.layers.0.self_attn.q_proj.weight",
        "unexpected: model.layers.7.surprise",
        "wrong shape: model.norm.weight is [95], expected [96]",
    )


def test_load_shortens_long_list_of_missing_tensors(folder: Path) -> None:
    rewrite_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers." in name])
    assert_load_raises(folder, "missing: ", "and 10 more")


def test_load_native_format_damaged_tensors_raise(tmp_path: Path) -> None:
    model = hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2)))
    model.save(tmp_path / "m")
    rewrite_tensors(tmp_path / "m", lambda tensors: tensors.pop("blocks.1.attention.output_projection.weight"))
    assert_load_raises(tmp_path / "m", "missing: blocks.1.attention.output_projection.weight")
    model.save(tmp_path / "m")
    rewrite_tensors(tmp_path / "m", lambda tensors: tensors["norm.weight"].fill_(torch.nan))
    assert_load_raises(tmp_path / "m", "norm.weight contains 8 NaN")
    (tmp_path / "m" / "model.safetensors").unlink()
    assert_load_raises(tmp_path / "m", "model.safetensors")


@pytest.mark.parametrize("storage", ["kvq", "../..", ""])
def test_load_native_format_unknown_storage_raises(storage: str, tmp_path: Path) -> None:
    hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2))).save(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    save_file(load_file(file), file, metadata={"storage": storage})
    assert_load_raises(tmp_path / "m", "storage")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"vocab": "many"}', "\x00", '{"vocab": 17, "sise": 3}'])
def test_load_native_format_invalid_spec_raises(text: str, tmp_path: Path) -> None:
    hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2))).save(tmp_path / "m")
    (tmp_path / "m" / "spec.json").write_text(text)
    with pytest.raises(hw.HeadwiseError):
        hw.load(tmp_path / "m")


def test_load_native_format_binary_spec_raises(tmp_path: Path) -> None:
    hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2))).save(tmp_path / "m")
    (tmp_path / "m" / "spec.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(hw.HeadwiseError):
        hw.load(tmp_path / "m")


# GGUF.


@pytest.mark.parametrize("length", [0, 3, 4, 20, 100, 0.5, -1])
def test_load_truncated_gguf_raises(length: float, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(make_llama(), file)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * length) if isinstance(length, float) else int(length)])
    assert_load_raises(file, "m.gguf: not a GGUF file, or truncated")


def test_load_gguf_invalid_header_raises(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(make_llama(), file)
    data = file.read_bytes()
    file.write_bytes(b"FUGG" + data[4:])
    assert_load_raises(file, "m.gguf: not a GGUF file")
    file.write_bytes(data[:4] + struct.pack("<I", 99) + data[8:])
    assert_load_raises(file, "m.gguf: not a GGUF file")
    file.write_bytes(data[:8] + struct.pack("<Q", 2**40) + data[16:])  # number of tensors
    assert_load_raises(file, "m.gguf: not a GGUF file")
    file.write_bytes(data[:16] + struct.pack("<Q", 2**40) + data[24:])  # number of fields
    assert_load_raises(file, "m.gguf: not a GGUF file")


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("mamba", "Supported: gpt2"),
        ("t5", "'attention.key_length' is missing"),
        ("gpt2", "'attention.layer_norm_epsilon' is missing"),
        ("bert", "token_types.weight"),
    ],
)
def test_load_gguf_unsupported_architecture_raises(arch: str, message: str, tmp_path: Path) -> None:
    write_gguf(make_llama(), tmp_path / "m.gguf", arch=arch)
    assert_load_raises(tmp_path / "m.gguf", message)


@pytest.mark.parametrize("heads", [0, 97, 2**31])
def test_load_gguf_invalid_head_count_raises(heads: int, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(make_llama(), file)
    data, key = file.read_bytes(), b"llama.attention.head_count"
    offset = data.index(key + struct.pack("<I", 4)) + len(key) + 4  # the type is followed by a four-byte integer
    file.write_bytes(data[:offset] + struct.pack("<I", heads) + data[offset + 4 :])
    assert_load_raises(file, "m.gguf")


def test_load_gguf_without_sizes_raises(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("token_embd.weight", torch.zeros(3, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_load_raises(tmp_path / "m.gguf", "is missing")


def test_load_folder_with_several_ggufs_raises(tmp_path: Path) -> None:
    write_gguf(make_llama(), tmp_path / "a.gguf")
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert_load_raises(tmp_path, "contains 2 GGUF files. Pass the path of one of them: a.gguf, b.gguf")


def test_open_checkpoint_empty_file_raises(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(hw.HeadwiseError, match="not a valid safetensors file"):
        open_checkpoint(folder)
