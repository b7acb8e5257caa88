"""Loading memory-maps the file: no copy is made, and changes of a model do not affect the file."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import headwise as hw
from tests.contract.layers import MODELS, make_model
from tests.parity import real
from tests.parity.cases import CASES, Case
from tests.weights.checkpoints import make_llama, write_gguf

linux_only = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory can be reset on Linux only"
)

# Runs in a separate process, with all imports done before the measurement.
PROGRAM = """
import json, sys
import torch
import headwise as hw

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name + ":"))

small, folder, dtype, run = sys.argv[1:]
torch.set_num_threads(1)
model = hw.load(small)
model(torch.tensor([[1, 2, 3]]))
del model
open("/proc/self/clear_refs", "w").write("5")
before, own = kilobytes("VmRSS"), kilobytes("RssAnon")
model = hw.load(folder, dtype=getattr(torch, dtype))
if run == "run":
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
rise, private = kilobytes("VmHWM") - before, kilobytes("RssAnon") - own
print(json.dumps({"rise": rise * 1024, "private": private * 1024}))
"""


def measure_loading(tmp_path: Path, dtype: str, run: str) -> tuple[float, float]:
    """Return by how much loading SmolLM2 raises peak memory and private memory, as a fraction of the file size."""
    make_llama().save_pretrained(tmp_path / "small")
    folder = real.smollm2_folder()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "small"), str(folder), dtype, run]
    result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 5e8
    return result["rise"] / size, result["private"] / size


@linux_only
@pytest.mark.parametrize("run", ["load", "run"])
def test_load_makes_no_second_copy(run: str, tmp_path: Path) -> None:
    """Mapped pages are not private either: two processes with the same model share its weights."""
    rise, private = measure_loading(tmp_path, "float32", run)
    assert rise < 1.3
    assert private < 0.1


@linux_only
def test_load_other_dtype_makes_one_copy(tmp_path: Path) -> None:
    rise, private = measure_loading(tmp_path, "bfloat16", "load")
    assert private < 0.6
    assert rise < 1.6


def modify_weights(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("case", CASES[:1] + CASES[5:6] + CASES[9:10] + CASES[14:15], ids=lambda case: case.name)
def test_load_modified_weights_leave_file_unchanged(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path / "m")
    before = digests(tmp_path / "m")
    model = hw.load(tmp_path / "m")
    modify_weights(model)
    assert digests(tmp_path / "m") == before
    again = hw.load(tmp_path / "m")
    assert not any(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_load_native_modified_weights_leave_file_unchanged(tmp_path: Path) -> None:
    make_model(MODELS["decoder"]).float().save(tmp_path / "m")
    before = digests(tmp_path / "m")
    modify_weights(hw.load(tmp_path / "m"))
    assert digests(tmp_path / "m") == before


def test_load_gguf_or_torch_modified_weights_leave_file_unchanged(tmp_path: Path) -> None:
    write_gguf(make_llama(), tmp_path / "m.gguf")
    make_llama().save_pretrained(tmp_path / "m")
    torch.save(load_file(tmp_path / "m" / "model.safetensors"), tmp_path / "m" / "pytorch_model.bin")
    (tmp_path / "m" / "model.safetensors").unlink()
    before = digests(tmp_path), digests(tmp_path / "m")
    modify_weights(hw.load(tmp_path / "m.gguf"))
    modify_weights(hw.load(tmp_path / "m"))
    assert (digests(tmp_path), digests(tmp_path / "m")) == before


def test_load_training_leaves_file_unchanged(tmp_path: Path) -> None:
    make_llama().save_pretrained(tmp_path / "m")
    before = digests(tmp_path / "m")
    model = hw.load(tmp_path / "m").train()
    steps = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([[1, 2, 3]])).square().mean().backward()
    steps.step()
    assert digests(tmp_path / "m") == before
    again = hw.load(tmp_path / "m")
    assert isinstance(model, hw.Transformer)
    assert isinstance(again, hw.Transformer)
    assert not torch.equal(model.embed.tokens.weight, again.embed.tokens.weight)
