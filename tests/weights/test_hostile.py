"""Files that are broken, or out to do harm: refused with a reason, nothing in them is run, nothing half-loaded comes back."""

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
    """A whole checkpoint, to be damaged."""
    make_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    return tmp_path / "model"


def assert_load_raises(source: Path | str, *fragments: str) -> None:
    """One error, whose text has all of these, in this order."""
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


# Broken safetensors.


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 200, -1, -5000])
def test_load_truncated_safetensors_raises(length: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:length])
    assert_load_raises(folder, "model.safetensors is no whole safetensors file", "fetch it again")


def test_load_safetensors_truncated_at_boundaries_raises(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    for length in (end - 1, end, end + 1, (end + len(data)) // 2):
        file.write_bytes(data[:length])
        assert_load_raises(folder, "no whole safetensors file")
    file.write_bytes(data + b"more")
    assert_load_raises(folder, "no whole safetensors file")


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
    """What a malicious file would hold: loading it makes a file."""

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
    assert_load_raises(folder, "pytorch_model.bin", "which could run code; it was refused", "safetensors")
    assert not marker.exists()
    assert pickle.loads(pickle.dumps(payload)) is None  # it does what we think
    assert marker.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's own, about what it is going to refuse
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
    with pytest.raises(hw.HeadwiseError, match=r"tokenizer\.json is not UTF-8"):
        hw.load(folder)
    assert not (tmp_path / "it-was-run").exists()


@pytest.mark.parametrize("content", [[torch.zeros(3)], {"a": 3}, {"a": {"b": torch.zeros(1)}}, torch.zeros(2), "text"])
def test_load_torch_file_without_state_dict_raises(content: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    assert_load_raises(folder, "pytorch_model.bin is not a table of tensors; a state dict is expected")


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


# Numbers that are none, tensors that do not fit.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.uint8])
def test_load_integer_weights_raise(dtype: torch.dtype, folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite_tensors(folder, lambda tensors: tensors.update({name: torch.ones_like(tensors[name]).to(dtype)}))
    assert_load_raises(folder, f"as {dtype}; weights are floating-point numbers")


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_load_non_finite_weights_raise(number: float, folder: Path) -> None:
    rewrite_tensors(folder, lambda tensors: tensors["model.layers.1.self_attn.v_proj.weight"][3, 4:6].fill_(number))
    assert_load_raises(folder, "is damaged: blocks.1.attention.qkv.v_weight holds 2 numbers that are NaN or infinite")


def test_load_large_weights_pass_and_infinities_raise(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite_tensors(folder, lambda tensors: tensors[name].fill_(3e38))
    assert hw.load(folder).spec.layers == 2  # large, but numbers
    rewrite_tensors(folder, lambda tensors: tensors[name].view(-1)[:2].copy_(torch.tensor([torch.inf, -torch.inf])))
    assert_load_raises(folder, "holds 2 numbers that are NaN or infinite")


def test_load_lists_missing_extra_and_misshapen_tensors(folder: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        tensors["model.layers.7.surprise"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(95)

    rewrite_tensors(folder, damage)
    assert_load_raises(
        folder,
        "does not hold the model its configuration describes",
        "missing: model.layers.0.self_attn.q_proj.weight",
        "not expected: model.layers.7.surprise",
        "misshapen: model.norm.weight is [95], expected [96]",
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
    assert_load_raises(tmp_path / "m", "norm.weight holds 8 numbers")
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
    assert_load_raises(file, "m.gguf is not a GGUF file, or is cut short")


def test_load_gguf_invalid_header_raises(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(make_llama(), file)
    data = file.read_bytes()
    file.write_bytes(b"FUGG" + data[4:])
    assert_load_raises(file, "m.gguf is not a GGUF file")
    file.write_bytes(data[:4] + struct.pack("<I", 99) + data[8:])
    assert_load_raises(file, "m.gguf is not a GGUF file")
    file.write_bytes(data[:8] + struct.pack("<Q", 2**40) + data[16:])  # as many tensors
    assert_load_raises(file, "m.gguf is not a GGUF file")
    file.write_bytes(data[:16] + struct.pack("<Q", 2**40) + data[24:])  # as many fields
    assert_load_raises(file, "m.gguf is not a GGUF file")


@pytest.mark.parametrize(("arch", "message"), [("mamba", "supported: gpt2"), ("gpt2", "Llama family only")])
def test_load_gguf_unsupported_architecture_raises(arch: str, message: str, tmp_path: Path) -> None:
    write_gguf(make_llama(), tmp_path / "m.gguf", arch=arch)
    assert_load_raises(tmp_path / "m.gguf", message)


@pytest.mark.parametrize("heads", [0, 97, 2**31])
def test_load_gguf_invalid_head_count_raises(heads: int, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(make_llama(), file)
    data, key = file.read_bytes(), b"llama.attention.head_count"
    offset = data.index(key + struct.pack("<I", 4)) + len(key) + 4  # a whole number of four bytes follows its kind
    file.write_bytes(data[:offset] + struct.pack("<I", heads) + data[offset + 4 :])
    assert_load_raises(file, "m.gguf")


def test_load_gguf_without_sizes_raises(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("token_embd.weight", torch.zeros(3, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_load_raises(tmp_path / "m.gguf", "lacks")


def test_load_folder_with_several_ggufs_raises(tmp_path: Path) -> None:
    write_gguf(make_llama(), tmp_path / "a.gguf")
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert_load_raises(tmp_path, "holds 2 GGUF files; name one of a.gguf, b.gguf")


def test_open_checkpoint_empty_file_raises(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(hw.HeadwiseError, match="no whole safetensors file"):
        open_checkpoint(folder)
