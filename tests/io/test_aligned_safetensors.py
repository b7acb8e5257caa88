"""Tensors in our own files start at multiples of 64 bytes, so that a loaded model gives bitwise equal outputs."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import headwise as hw
from headwise.io.aligned_safetensors import ALIGNMENT, align, read_tensors, write_tensors
from headwise.training.optimizer import make_optimizer, optimizer_state, restore_optimizer, trainable_parameters
from tests.contract.layers import MODELS, make_model, run_model
from tests.weights.checkpoints import assert_same_model, copy_to_own_memory, make_llama, write_gguf

ODD = {  # sizes in bytes: 12, 128, 0, 6, 4, 64, 3, 40, 192
    "three": torch.arange(3.0),
    "sixteen": torch.arange(16.0, dtype=torch.float64).reshape(4, 4),
    "nothing": torch.zeros(0, 5),
    "half": torch.arange(3.0).bfloat16(),
    "one": torch.tensor(7.0),
    "integers": torch.arange(8),
    "flags": torch.tensor([True, False, True]),
    "five": torch.arange(5.0, dtype=torch.float64),
    "turned": torch.arange(48.0).reshape(12, 4).t(),
}


def misaligned(model: torch.nn.Module) -> list[str]:
    return [name for name, weight in model.named_parameters() if weight.data_ptr() % ALIGNMENT]


def tensor_spans(file: Path) -> dict[str, tuple[int, int]]:
    """Return the start and end of each tensor in a file, parsed by hand."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    assert content[8:9] == b"{"
    return {name: tuple(8 + length + offset for offset in entry["data_offsets"]) for name, entry in header.items()}


def test_write_tensors_aligns_without_gaps(tmp_path: Path) -> None:
    write_tensors(ODD, tmp_path / "m", {"said": "ä"})
    spans = tensor_spans(tmp_path / "m")
    assert {name for name, (start, _) in spans.items() if start % 64 == 0} >= {
        "sixteen",
        "nothing",
        "integers",
        "turned",
    }
    assert all(start % ODD[name].element_size() == 0 for name, (start, _) in spans.items())
    ends = sorted(spans.values())
    assert ends[0][0] % 64 == 0
    assert [start for start, _ in ends[1:]] == [end for _, end in ends[:-1]]
    assert ends[-1][1] == (tmp_path / "m").stat().st_size


def test_write_tensors_is_read_by_safetensors(tmp_path: Path) -> None:
    write_tensors(ODD, tmp_path / "m", {"said": "ä"})
    back = load_file(tmp_path / "m")
    assert back.keys() == ODD.keys()
    for name, tensor in ODD.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back[name], tensor)
    with safe_open(tmp_path / "m", "pt") as opened:
        assert opened.metadata() == {"said": "ä"}
    assert all(tensor.data_ptr() % 64 == 0 for tensor in read_tensors(tmp_path / "m").values())


def test_write_tensors_empty_writes_file(tmp_path: Path) -> None:
    write_tensors({}, tmp_path / "m")
    assert load_file(tmp_path / "m") == {}


def test_write_tensors_unsupported_dtype_raises(tmp_path: Path) -> None:
    with pytest.raises(hw.HeadwiseError, match=r"odd.*torch.complex64 cannot be stored"):
        write_tensors({"odd": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "m")


def test_aligned_copy_keeps_strides(tmp_path: Path) -> None:
    transposed = torch.arange(25.0)[1:].reshape(4, 6).t()
    assert transposed.data_ptr() % 64
    assert align(transposed).stride() == transposed.stride()


@pytest.mark.usefixtures("straight")
@pytest.mark.parametrize("written", ["by us", "by others"])
@pytest.mark.parametrize("name", MODELS)
def test_load_native_file_gives_aligned_weights(name: str, written: str, tmp_path: Path) -> None:
    """Also for a file in which another writer placed the same tensors."""
    model = make_model(MODELS[name])
    model.save(tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    if written == "by others":
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() | {"odd": ""}
        save_file({key: tensor.clone() for key, tensor in load_file(file).items()}, file, metadata=metadata)
    back = hw.load(tmp_path / "m", dtype=None)
    assert misaligned(back) == []
    assert_same_model(back, model)
    assert torch.equal(run_model(back), run_model(copy_to_own_memory(model)))


@pytest.mark.usefixtures("straight")
@pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is told on Linux")
def test_load_native_file_keeps_weights_mapped(tmp_path: Path) -> None:
    """Only unaligned tensors are copied; here every size is a multiple of 64."""
    spec = hw.ModelSpec(vocab=32, context=16, layers=1, attention=hw.AttentionSpec(width=32, heads=2), mlp_width=64)
    hw.Transformer(spec, storage="q,k,v").save(tmp_path / "m")
    back = hw.load(tmp_path / "m")
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "model.safetensors" in line]
    ranges = [[int(edge, 16) for edge in line[0].split("-")] for line in lines]
    mapped = [name for name, w in back.named_parameters() if any(a <= w.data_ptr() < b for a, b in ranges)]
    assert {"embed.tokens.weight", "blocks.0.mlp.up.weight"} <= set(mapped), mapped


@pytest.mark.usefixtures("straight")
def test_load_gguf_gives_aligned_weights(tmp_path: Path) -> None:
    write_gguf(make_llama(), tmp_path / "m.gguf")
    assert misaligned(hw.load(tmp_path / "m.gguf")) == []


def test_restore_optimizer_gives_aligned_state(tmp_path: Path) -> None:
    def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = make_model(MODELS["decoder"])
        optimizer = make_optimizer(dict(trainable_parameters(model)), hw.Recipe())
        run_model(model).square().mean().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = stepped()
    before: dict[str, Tensor] = {
        name: value.clone() for name, value in optimizer_state(dict(trainable_parameters(model)), optimizer).items()
    }
    write_tensors(before, tmp_path / "o")
    other, fresh = stepped()
    restore_optimizer(dict(trainable_parameters(other)), fresh, read_tensors(tmp_path / "o"))
    after = optimizer_state(dict(trainable_parameters(other)), fresh)
    assert all(value.data_ptr() % 64 == 0 and torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.usefixtures("straight")
def test_train_misaligned_weights_are_realigned() -> None:
    """A resumed run must use the same matmul code paths as the first run, wherever its weights come from."""
    model = hw.Transformer(hw.preset("synthetic").resized(layers=1, width=16))
    for parameter in model.parameters():
        storage = torch.zeros(parameter.numel() + 1)
        parameter.data = storage[1:].view(parameter.shape).copy_(parameter.data)
    assert misaligned(model)
    hw.train(
        model, "to be or not to be " * 9, hw.Recipe(steps=1, batch_size=2, context=8), tokenizer="byte", progress=False
    )
    assert misaligned(model) == []
