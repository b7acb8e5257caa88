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


def refused(source: Path | str, *said: str) -> None:
    """One error, whose text has all of these, in this order."""
    pattern = ".*".join(re.escape(part) for part in said)
    with pytest.raises(hw.HeadwiseError, match=re.compile(pattern, re.DOTALL)):
        hw.load(source)


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))


# Broken safetensors.


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 200, -1, -5000])
def test_a_file_cut_short(cut: int, folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    refused(folder, "model.safetensors is no whole safetensors file", "fetch it again")


def test_a_file_cut_short_inside_its_header_and_its_numbers(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    for cut in (end - 1, end, end + 1, (end + len(whole)) // 2):
        file.write_bytes(whole[:cut])
        refused(folder, "no whole safetensors file")
    file.write_bytes(whole + b"more")
    refused(folder, "no whole safetensors file")


def raw(header: Any, numbers: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers


def entry(start: int, end: int, shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "a header as long as the sea": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 10_000) + b"{}",
    "offsets beyond the end": raw({"a": entry(0, 2**62, [2**60])}),
    "offsets that run back": raw({"a": entry(16, 0, [4])}, bytes(16)),
    "negative offsets": raw({"a": entry(-16, 0, [4])}, bytes(16)),
    "a negative size": raw({"a": entry(0, 16, [-4])}, bytes(16)),
    "a size that overflows": raw({"a": entry(0, 16, [2**63, 2**63])}, bytes(16)),
    "tensors that overlap": raw({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, bytes(24)),
    "tensors with a hole": raw({"a": entry(0, 16, [4]), "b": entry(20, 36, [4])}, bytes(36)),
    "offsets that do not fit the shape": raw({"a": entry(0, 12, [4])}, bytes(12)),
    "a type nobody knows": raw({"a": {"dtype": "F33", "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
    "no JSON": raw(b"not json at all"),
    "a list": raw([1, 2]),
    "nested without end": raw(b"[" * 100_000),
    "a pickle": pickle.dumps({"a": 1}),
    "a GGUF": b"GGUF" + bytes(64),
    "zeros": bytes(64),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies(name: str, folder: Path) -> None:
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
def test_a_pickle_is_not_run(place: str, old_format: bool, folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it-was-run"
    tensors: Any = load_file(folder / "model.safetensors")
    harm: Any = Payload(marker)
    tensors = harm if place == "top" else {**tensors, "more": harm} if place == "value" else {"a": tensors, "b": [harm]}
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old_format)
    refused(folder, "pytorch_model.bin", "which could run code; it was refused", "safetensors")
    assert not marker.exists()
    assert pickle.loads(pickle.dumps(harm)) is None  # it does what we think
    assert marker.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's own, about what it is going to refuse
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "weights.pt", "model.safetensors"])
def test_a_bare_pickle_is_not_run(name: str, protocol: int, folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it-was-run"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload(marker), protocol))
    if name.startswith("consolidated"):
        (folder / "config.json").unlink()
        (folder / "params.json").write_text(json.dumps({"dim": 96, "n_layers": 2, "n_heads": 6}))
    with pytest.raises(hw.HeadwiseError, match=rf"{re.escape(name)}"):
        hw.load(folder / name if name == "weights.pt" else folder)
    assert not marker.exists()


def test_a_pickled_tokenizer_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_bytes(pickle.dumps(Payload(tmp_path / "it-was-run")))
    with pytest.raises(hw.HeadwiseError, match=r"tokenizer\.json is not UTF-8"):
        hw.load(folder)
    assert not (tmp_path / "it-was-run").exists()


@pytest.mark.parametrize("content", [[torch.zeros(3)], {"a": 3}, {"a": {"b": torch.zeros(1)}}, torch.zeros(2), "text"])
def test_a_torch_file_of_other_things(content: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin is not a table of tensors; a state dict is expected")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"\x80\x02", bytes(100), b"hello"])
def test_a_torch_file_that_is_none(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    refused(folder, "pytorch_model.bin")


def test_a_torch_file_cut_short(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    whole = (folder / "pytorch_model.bin").read_bytes()
    for cut in (10, len(whole) // 2, len(whole) - 3):
        (folder / "pytorch_model.bin").write_bytes(whole[:cut])
        refused(folder, "pytorch_model.bin")


# Numbers that are none, tensors that do not fit.


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.uint8])
def test_weights_that_are_whole_numbers(dtype: torch.dtype, folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones_like(tensors[name]).to(dtype)}))
    refused(folder, f"as {dtype}; weights are floating-point numbers")


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers(number: float, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors["model.layers.1.self_attn.v_proj.weight"][3, 4:6].fill_(number))
    refused(folder, "is damaged: blocks.1.attention.read.v_weight holds 2 numbers that are NaN or infinite")


def test_infinities_that_cancel_and_sums_that_overflow(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(folder, lambda tensors: tensors[name].fill_(3e38))
    assert hw.load(folder).spec.layers == 2  # large, but numbers
    rewrite(folder, lambda tensors: tensors[name].view(-1)[:2].copy_(torch.tensor([torch.inf, -torch.inf])))
    refused(folder, "holds 2 numbers that are NaN or infinite")


def test_tensors_that_are_missing_extra_or_misshapen_are_listed(folder: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.layers.0.self_attn.q_proj.weight"]
        tensors["model.layers.7.surprise"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(95)

    rewrite(folder, damage)
    refused(
        folder,
        "does not hold the model its configuration describes",
        "missing: model.layers.0.self_attn.q_proj.weight",
        "not expected: model.layers.7.surprise",
        "misshapen: model.norm.weight is [95], expected [96]",
    )


def test_a_long_list_is_cut(folder: Path) -> None:
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers." in name])
    refused(folder, "missing: ", "and 10 more")


def test_our_own_format_is_checked_as_well(tmp_path: Path) -> None:
    model = hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2)))
    model.save(tmp_path / "m")
    rewrite(tmp_path / "m", lambda tensors: tensors.pop("blocks.1.attention.write.weight"))
    refused(tmp_path / "m", "missing: blocks.1.attention.write.weight")
    model.save(tmp_path / "m")
    rewrite(tmp_path / "m", lambda tensors: tensors["norm.weight"].fill_(torch.nan))
    refused(tmp_path / "m", "norm.weight holds 8 numbers")
    (tmp_path / "m" / "model.safetensors").unlink()
    refused(tmp_path / "m", "model.safetensors")


@pytest.mark.parametrize("storage", ["kvq", "../..", ""])
def test_our_own_format_with_a_storage_nobody_knows(storage: str, tmp_path: Path) -> None:
    hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2))).save(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    save_file(load_file(file), file, metadata={"storage": storage})
    refused(tmp_path / "m", "storage")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"vocab": "many"}', "\x00", '{"vocab": 17, "sise": 3}'])
def test_our_own_format_with_a_broken_spec(text: str, tmp_path: Path) -> None:
    hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2))).save(tmp_path / "m")
    (tmp_path / "m" / "spec.json").write_text(text)
    with pytest.raises(hw.HeadwiseError):
        hw.load(tmp_path / "m")


def test_our_own_format_with_a_spec_that_is_no_text(tmp_path: Path) -> None:
    hw.Transformer(hw.ModelSpec(17, 8, 2, hw.AttentionSpec(8, 2))).save(tmp_path / "m")
    (tmp_path / "m" / "spec.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(hw.HeadwiseError):
        hw.load(tmp_path / "m")


# GGUF.


@pytest.mark.parametrize("cut", [0, 3, 4, 20, 100, 0.5, -1])
def test_a_gguf_cut_short(cut: float, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(make_llama(), file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * cut) if isinstance(cut, float) else int(cut)])
    refused(file, "m.gguf is not a GGUF file, or is cut short")


def test_a_gguf_with_another_magic_or_version(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(make_llama(), file)
    whole = file.read_bytes()
    file.write_bytes(b"FUGG" + whole[4:])
    refused(file, "m.gguf is not a GGUF file")
    file.write_bytes(whole[:4] + struct.pack("<I", 99) + whole[8:])
    refused(file, "m.gguf is not a GGUF file")
    file.write_bytes(whole[:8] + struct.pack("<Q", 2**40) + whole[16:])  # as many tensors
    refused(file, "m.gguf is not a GGUF file")
    file.write_bytes(whole[:16] + struct.pack("<Q", 2**40) + whole[24:])  # as many fields
    refused(file, "m.gguf is not a GGUF file")


@pytest.mark.parametrize(("arch", "said"), [("mamba", "supported: gpt2"), ("gpt2", "Llama family only")])
def test_a_gguf_of_another_architecture(arch: str, said: str, tmp_path: Path) -> None:
    write_gguf(make_llama(), tmp_path / "m.gguf", arch=arch)
    refused(tmp_path / "m.gguf", said)


@pytest.mark.parametrize("heads", [0, 97, 2**31])
def test_a_gguf_whose_heads_cannot_be(heads: int, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(make_llama(), file)
    whole, key = file.read_bytes(), b"llama.attention.head_count"
    at = whole.index(key + struct.pack("<I", 4)) + len(key) + 4  # a whole number of four bytes follows its kind
    file.write_bytes(whole[:at] + struct.pack("<I", heads) + whole[at + 4 :])
    refused(file, "m.gguf")


def test_a_gguf_that_lacks_its_sizes(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tensor("token_embd.weight", torch.zeros(3, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", "lacks")


def test_a_folder_of_several_ggufs(tmp_path: Path) -> None:
    write_gguf(make_llama(), tmp_path / "a.gguf")
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    refused(tmp_path, "holds 2 GGUF files; name one of a.gguf, b.gguf")


def test_opening_refuses_what_loading_refuses(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(hw.HeadwiseError, match="no whole safetensors file"):
        open_checkpoint(folder)
