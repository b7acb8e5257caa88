"""Output paths that already exist, full disks, and models that a target does not support."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import headwise as hw
from headwise.exporters.engine_parity import ParityReport
from headwise.spec import CachePolicy
from tests.exporters.llamas import make_llama
from tests.io.full_disk import limited_file_size

TRACED = [pytest.param(*target, marks=pytest.mark.slow) for target in (("torch", "m.pt2"), ("onnx", "m"))]
TARGETS = [("gguf", "m.gguf"), ("transformers", "m"), *TRACED]


def read_bytes_by_name(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize(("to", "name"), TARGETS)
def test_export_full_disk_leaves_existing_files_unchanged(to: str, name: str, tmp_path: Path) -> None:
    model = make_llama(layers=1)
    with (
        limited_file_size(20_000),
        pytest.raises(hw.HeadwiseError, match=r"could not be written .*Nothing was changed"),
    ):
        hw.export(model, tmp_path / name, to=to)
    assert not list(tmp_path.iterdir()), "nothing half-written"
    hw.export(model, tmp_path / name, to=to)
    before = read_bytes_by_name(tmp_path / name)
    with limited_file_size(20_000), pytest.raises(hw.HeadwiseError, match="Nothing was changed"):
        hw.export(model, tmp_path / name, to=to)
    assert read_bytes_by_name(tmp_path / name) == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_export_foreign_files_are_not_overwritten(tmp_path: Path) -> None:
    """A GGUF file, an archive and a transformers folder that Headwise did not export, and a model saved by Headwise."""
    model = make_llama(layers=1)
    model.save(tmp_path / "saved")
    hw.export(model, tmp_path / "theirs")
    (tmp_path / "theirs" / "headwise-export.json").unlink()
    hw.export(model, tmp_path / "theirs.gguf", to="gguf")
    foreign_bytes = (tmp_path / "theirs.gguf").read_bytes().replace(b"written by headwise", b"somebody else's ...")
    (tmp_path / "theirs.gguf").write_bytes(foreign_bytes)
    torch.save({"a": 1}, tmp_path / "theirs.pt2")
    before = {path.name: read_bytes_by_name(path) for path in tmp_path.iterdir()}
    for to, name in (("gguf", "theirs.gguf"), ("torch", "theirs.pt2"), ("transformers", "theirs")):
        with pytest.raises(hw.HeadwiseError, match="by Headwise"):
            hw.export(model, tmp_path / name, to=to)
    for to in ("transformers", "onnx"):
        with pytest.raises(hw.HeadwiseError, match="not written by Headwise"):
            hw.export(model, tmp_path / "saved", to=to)
    assert {path.name: read_bytes_by_name(path) for path in tmp_path.iterdir()} == before


def test_export_existing_export_is_replaced(tmp_path: Path) -> None:
    model = make_llama(layers=1)
    for seed in (0, 1):
        model = make_llama(seed, layers=1)
        hw.export(model, tmp_path / "m.gguf", to="gguf")
        exported = hw.export(model, tmp_path / "m", to="transformers", check=True)
        assert isinstance(exported.parity, ParityReport)
        assert exported.parity.max_difference < 1e-4
        assert exported.parity.diverged == 0
    attached = hw.attach(AutoModelForCausalLM.from_pretrained(tmp_path / "m"))
    assert hw.export(attached, tmp_path / "m", check=True).parity is not None, "an attached model, in place of it"


def test_export_encoder_decoder_to_other_targets_raises(tmp_path: Path) -> None:
    config = T5Config(vocab_size=30, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    attached_t5 = hw.attach(T5ForConditionalGeneration(config).eval())
    spec = hw.ModelSpec(9, 9, 1, hw.AttentionSpec(8, 2), kind="encoder-decoder")
    for to, name in (("onnx", "a"), ("torch", "a.pt2")):
        with pytest.raises(hw.HeadwiseError, match=r"encoder-decoder.*Use model\.save"):
            hw.export(attached_t5, tmp_path / name, to=to)
    for to, name in (("gguf", "a.gguf"), ("onnx", "a"), ("torch", "a.pt2")):
        with pytest.raises(hw.HeadwiseError, match="encoder-decoder"):
            hw.export(hw.Transformer(spec), tmp_path / name, to=to)
    hw.export(attached_t5, tmp_path / "t5")
    with pytest.raises(hw.HeadwiseError, match="can be checked"):
        hw.export(attached_t5, tmp_path / "t5", check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t5"]


@pytest.mark.slow
def test_export_per_head_bits_torch_only(tmp_path: Path) -> None:
    """torch.export stores quantized weights. transformers and GGUF do not, and need a dequantized model."""
    model = hw.quantize(make_llama(layers=1), {"0.0": 4, "0.1": 8, "0.2": 3})
    exported = hw.export(model, tmp_path / "m.pt2", to="torch", check=True)
    assert isinstance(exported.parity, ParityReport)
    assert exported.parity.max_difference < 1e-4
    for to, name, message in (("transformers", "m", "quantized per head"), ("gguf", "m.gguf", "quantized per head")):
        with pytest.raises(hw.HeadwiseError, match=message):
            hw.export(model, tmp_path / name, to=to)
        hw.export(hw.dequantize(model), tmp_path / name, to=to)


@pytest.mark.parametrize("to", ["transformers", "gguf", "onnx", "torch"])
def test_export_per_head_cache_raises(to: str, tmp_path: Path) -> None:
    spec = make_llama(layers=1).spec.with_cache({"0.0": CachePolicy(sink_tokens=1, window=4)})
    with pytest.raises(hw.HeadwiseError, match="per-head cache policies"):
        hw.export(hw.Transformer(spec), tmp_path / "m.pt2", to=to)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_export_onnx_per_head_bits_matches_model(tmp_path: Path) -> None:
    model = hw.quantize(make_llama(layers=1), {"0.0": 4, "0.1": 8, "0.2": 3})
    exported = hw.export(model, tmp_path / "m", to="onnx", check=True)
    assert isinstance(exported.parity, ParityReport)
    assert exported.parity.max_difference < 1e-4
    assert exported.parity.diverged == 0
