"""One generated token with a per-head cache calls functions of few files, so that the code path is readable."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import headwise as hw

PACKAGE = Path(hw.__file__).parent
MAX_FILES = 14


def files_called(function: Callable[[], object]) -> set[str]:
    """Return the files of the package in which a call enters a Python function."""
    files = set()

    def note_file(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(str(path.relative_to(PACKAGE)))

    previous = sys.getprofile()
    sys.setprofile(note_file)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return files


@pytest.mark.parametrize("prompt_length", [2, 10], ids=["before the first eviction", "after it"])
@torch.no_grad()
def test_decode_step_per_head_cache_crosses_few_files(prompt_length: int) -> None:
    attention = hw.AttentionSpec(width=32, heads=4, kv_heads=2, rotary=hw.Rotary())
    spec = hw.ModelSpec(vocab=50, context=64, layers=2, attention=attention, norm="rms", activation="swiglu")
    spec = spec.with_cache({"0.0": hw.CachePolicy(sink_tokens=1, window=3), "1.1": hw.CachePolicy(window=4)})
    model, token = hw.Transformer(spec).eval(), torch.tensor([[3]])
    cache = model.cache()
    model(torch.arange(prompt_length)[None], cache=cache)
    model(token, cache=cache)  # the first step times the matrix products
    files = files_called(lambda: model(token, cache=cache))
    assert {"heads/attention.py", "cache/per_head_cache.py", "cache/head_groups.py", "kernels/fused.py"} <= files
    assert len(files) <= MAX_FILES, sorted(files)
