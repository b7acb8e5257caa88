"""Saved and reloaded pruned models keep the dtype and the bits of every parameter and buffer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.attached.models import BY_NAME, main_output

HALVES = (torch.bfloat16, torch.float16)


def rotary_model(name: str, dtype: torch.dtype, folder: Path) -> Any:
    """Return a model as transformers loads it in half precision, with rotary frequencies in float32."""
    case = BY_NAME[name]
    case.build().save_pretrained(folder)
    model = type(case.build()).from_pretrained(folder, dtype=dtype).eval()
    if name != "gpt2":
        assert any(buffer.dtype == torch.float32 for _, buffer in model.named_buffers())
    return model


def tensors_of(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def check_equal_bits(model: Any, again: Any) -> None:
    before, after = tensors_of(model), tensors_of(again)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3"])
@pytest.mark.parametrize("cast", [False, True], ids=["loaded", "cast"])
@torch.no_grad()
def test_reload_of_a_pruned_half_model_keeps_buffers(name: str, dtype: torch.dtype, cast: bool, tmp_path: Path) -> None:
    model = rotary_model(name, dtype, tmp_path / "plain")
    model = model.to(dtype) if cast else model  # like .half(), which also casts buffers
    inputs = BY_NAME[name].inputs()
    attached = hw.attach(model).prune("1.1,2.*", in_place=True)
    before = main_output(model(**inputs))
    attached.save_pretrained(tmp_path / "pruned")
    for load_dtype in (dtype, None):
        again: Any = hw.load(tmp_path / "pruned", dtype=load_dtype)
        check_equal_bits(model, again.model)
        assert torch.equal(main_output(again.model(**inputs)), before)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_reload_in_another_dtype_has_the_buffers_of_transformers(name: str, tmp_path: Path) -> None:
    model = rotary_model(name, torch.bfloat16, tmp_path / "plain")
    attached = hw.attach(model).prune("1.1", in_place=True)
    attached.save_pretrained(tmp_path / "pruned")
    for dtype in (torch.float32, torch.float16):
        plain = dict(type(model).from_pretrained(tmp_path / "plain", dtype=dtype).named_buffers())
        again: Any = hw.load(tmp_path / "pruned", dtype=dtype)
        buffers = dict(again.model.named_buffers())
        assert {name: buffer.dtype for name, buffer in buffers.items()} == {
            name: buffer.dtype for name, buffer in plain.items()
        }
        assert all(torch.equal(buffers[name], plain[name]) for name in plain)
        assert {weight.dtype for weight in again.model.parameters()} == {dtype}


@torch.no_grad()
def test_metadata_without_dtypes_loads_rotary_frequencies_in_float32(tmp_path: Path) -> None:
    model = rotary_model("llama", torch.bfloat16, tmp_path / "plain")
    attached = hw.attach(model).prune("1.1", in_place=True)
    attached.save_pretrained(tmp_path / "pruned")
    file = tmp_path / "pruned" / "headwise.json"
    metadata = json.loads(file.read_text())
    file.write_text(json.dumps({key: metadata[key] for key in ("format", "class", "kept_heads")}))
    again: Any = hw.load(tmp_path / "pruned", dtype=None)
    check_equal_bits(model, again.model)


def test_metadata_with_an_unknown_dtype_cannot_be_loaded(tmp_path: Path) -> None:
    hw.attach(BY_NAME["llama"].build()).prune("1.1", in_place=True).save_pretrained(tmp_path / "pruned")
    file = tmp_path / "pruned" / "headwise.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "load"}))
    with pytest.raises(hw.HeadwiseError, match="not a valid metadata file"):
        hw.load(tmp_path / "pruned")


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@torch.no_grad()
def test_whole_save_of_a_pruned_half_model_is_the_silenced_model(dtype: torch.dtype, tmp_path: Path) -> None:
    model = rotary_model("gemma3", dtype, tmp_path / "plain")
    inputs = BY_NAME["gemma3"].inputs()
    attached = hw.attach(model).prune("1.1,2.*", in_place=True)
    attached.save_pretrained(tmp_path / "whole", full_shape=True)
    full = type(model).from_pretrained(tmp_path / "whole", dtype=dtype).eval()
    attached.detach()
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(full.named_buffers())[name], buffer)
    logits = main_output(model(**inputs)).double()
    assert (main_output(full(**inputs)).double() - logits).abs().max() <= torch.finfo(
        dtype
    ).eps ** 0.5 * logits.abs().max()
