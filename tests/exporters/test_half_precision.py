"""Exports of models in half precision."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw

SPEC = hw.preset("gpt2").resized(layers=1, width=32, heads=2, context=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("to", "name", "bound"),
    [
        ("transformers", "folder", 1e-4),
        ("gguf", "model.gguf", 1e-3),
        pytest.param("onnx", "graphs", 1e-4, marks=pytest.mark.slow),
        ("torch", "model.pt2", 0.1),  # runs in half precision
    ],
)
def test_export_half_model_agrees_in_its_engine(
    to: str, name: str, bound: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = hw.Transformer(SPEC).to(dtype)
    options: dict[str, Any] = {"tokenizer": False} if to == "gguf" else {}
    parity: Any = hw.export(model, tmp_path / name, to=to, check=True, **options).parity
    assert parity.agrees
    assert parity.max_difference < bound
    assert {weight.dtype for weight in model.parameters()} == {dtype}
