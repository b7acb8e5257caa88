"""Where things are written: what is there already, a disk that is full; and what a target refuses by name."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import headwise as hw
from headwise.exporters.parity import Checked
from headwise.spec import Keeps
from tests.exporters.llamas import llama
from tests.io.full_disk import files_up_to

TRACED = [pytest.param(*one, marks=pytest.mark.slow) for one in (("torch", "m.pt2"), ("onnx", "m"))]
TARGETS = [("gguf", "m.gguf"), ("transformers", "m"), *TRACED]


def bytes_of(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize(("to", "name"), TARGETS)
def test_a_full_disk_and_what_is_there(to: str, name: str, tmp_path: Path) -> None:
    model = llama(layers=1)
    with files_up_to(20_000), pytest.raises(hw.HeadwiseError, match=r"could not be written .*; nothing was changed"):
        hw.export(model, tmp_path / name, to=to)
    assert not list(tmp_path.iterdir()), "nothing half-written"
    hw.export(model, tmp_path / name, to=to)
    before = bytes_of(tmp_path / name)
    with files_up_to(20_000), pytest.raises(hw.HeadwiseError, match="nothing was changed"):
        hw.export(model, tmp_path / name, to=to)
    assert bytes_of(tmp_path / name) == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """A GGUF file, an archive and a transformers folder that were not exported here; and a model saved here."""
    model = llama(layers=1)
    model.save(tmp_path / "saved")
    hw.export(model, tmp_path / "theirs")
    (tmp_path / "theirs" / "headwise-export.json").unlink()
    hw.export(model, tmp_path / "theirs.gguf", to="gguf")
    theirs = (tmp_path / "theirs.gguf").read_bytes().replace(b"written by headwise", b"somebody else's ...")
    (tmp_path / "theirs.gguf").write_bytes(theirs)
    torch.save({"a": 1}, tmp_path / "theirs.pt2")
    before = {path.name: bytes_of(path) for path in tmp_path.iterdir()}
    for to, name in (("gguf", "theirs.gguf"), ("torch", "theirs.pt2"), ("transformers", "theirs")):
        with pytest.raises(hw.HeadwiseError, match="choose another"):
            hw.export(model, tmp_path / name, to=to)
    for to in ("transformers", "onnx"):
        with pytest.raises(hw.HeadwiseError, match="holds something else"):
            hw.export(model, tmp_path / "saved", to=to)
    assert {path.name: bytes_of(path) for path in tmp_path.iterdir()} == before


def test_what_was_exported_is_replaced(tmp_path: Path) -> None:
    model = llama(layers=1)
    for seed in (0, 1):
        model = llama(seed, layers=1)
        hw.export(model, tmp_path / "m.gguf", to="gguf")
        made = hw.export(model, tmp_path / "m", to="transformers", check=True)
        assert isinstance(made.checked, Checked)
        assert made.checked.largest < 1e-4
        assert made.checked.parted == 0
    theirs = hw.attach(AutoModelForCausalLM.from_pretrained(tmp_path / "m"))
    assert hw.export(theirs, tmp_path / "m", check=True).checked is not None, "an attached model, in place of it"


def test_attached_models_and_encoder_decoders(tmp_path: Path) -> None:
    hw.export(llama(layers=1), tmp_path / "m")
    theirs = hw.attach(AutoModelForCausalLM.from_pretrained(tmp_path / "m"))
    config = T5Config(vocab_size=30, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    two = hw.attach(T5ForConditionalGeneration(config).eval())
    for to, name in (("gguf", "a.gguf"), ("onnx", "a"), ("torch", "a.pt2")):
        with pytest.raises(hw.HeadwiseError, match=r"headwise's own models.*; this is an attached Mistral"):
            hw.export(theirs, tmp_path / name, to=to)
        with pytest.raises(hw.HeadwiseError, match="this is an attached T5"):
            hw.export(two, tmp_path / name, to=to)
        with pytest.raises(hw.HeadwiseError, match="encoder-decoder"):
            hw.export(
                hw.Transformer(hw.ModelSpec(9, 9, 1, hw.AttentionSpec(8, 2), kind="encoder-decoder")),
                tmp_path / name,
                to=to,
            )
    hw.export(two, tmp_path / "t5")
    with pytest.raises(hw.HeadwiseError, match="this model does neither"):
        hw.export(two, tmp_path / "t5", check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "t5"]


@pytest.mark.slow
def test_bits_by_head(tmp_path: Path) -> None:
    """A file of torch's holds them; transformers and GGUF do not, and take the numbers they stand for."""
    model = hw.quantise(llama(layers=1), {"0.0": 4, "0.1": 8, "0.2": 3})
    made = hw.export(model, tmp_path / "m.pt2", to="torch", check=True)
    assert isinstance(made.checked, Checked)
    assert made.checked.largest < 1e-4
    for to, name, said in (("transformers", "m", "packed by head"), ("gguf", "m.gguf", "bits by head")):
        with pytest.raises(hw.HeadwiseError, match=said):
            hw.export(model, tmp_path / name, to=to)
        hw.export(hw.dequantise(model), tmp_path / name, to=to)


@pytest.mark.parametrize("to", ["transformers", "gguf", "onnx", "torch"])
def test_heads_with_caches_of_their_own_go_nowhere(to: str, tmp_path: Path) -> None:
    spec = llama(layers=1).spec.caching({"0.0": Keeps(first=1, last=4)})
    with pytest.raises(hw.HeadwiseError, match="caches of their own"):
        hw.export(hw.Transformer(spec), tmp_path / "m.pt2", to=to)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_bits_by_head_in_onnx(tmp_path: Path) -> None:
    model = hw.quantise(llama(layers=1), {"0.0": 4, "0.1": 8, "0.2": 3})
    made = hw.export(model, tmp_path / "m", to="onnx", check=True)
    assert isinstance(made.checked, Checked)
    assert made.checked.largest < 1e-4
    assert made.checked.parted == 0
