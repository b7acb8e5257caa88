"""The window of a hook point equals the window of the layer's masks, attached and loaded natively."""

from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.heads.hook_point import AttentionCall
from tests.attached.models import BY_NAME, CASES, Case, T, transformers
from tests.attached.test_analysis import save_model
from tests.contract.layers import MODELS, make_model

# Configured windows: 5 keys including the query's own; ModernBERT sees 6 keys around a token, 3 on each side.
EXPECTED_WINDOWS = {
    "mistral": (5, 5, 5),
    "gemma3": (5, 5, 5),  # every sixth layer has full attention
    "qwen2_windows": (None, 5, 5),
    "modernbert": (None, 4, 4),
    "gpt_oss": (5, None, 5),
    "gemma2": (5, None, 5),
    "gpt_neo": (None, 5, None),
}


def max_visible_distance(call: AttentionCall) -> int:
    """Return the distance of the farthest key that any query sees."""
    mask = call.params.mask
    n = call.q.shape[2]
    allowed = torch.ones(1, 1, n, n, dtype=torch.bool) if mask is None else mask.dense(n, n)
    rows, columns = allowed.any(0).any(0).nonzero(as_tuple=True)
    return int((rows - columns).abs().max())


@pytest.mark.parametrize("case", [c for c in CASES if c.kind in ("decoder", "encoder")], ids=lambda case: case.name)
def test_hook_point_window_matches_mask(case: Case) -> None:
    attached = hw.attach(case.build())
    windows = tuple(hook_point.window for hook_point in attached.hook_points())
    assert windows == EXPECTED_WINDOWS.get(case.name, (None, None, None))
    assert windows == tuple(
        attached.spec.attention_at(hook_point.address).window for hook_point in attached.hook_points()
    )
    calls: list[AttentionCall] = []
    for hook_point in attached.hook_points():
        with hook_point.listen(calls.append), torch.no_grad():
            attached(case.inputs()["input_ids"])
    assert [max_visible_distance(call) for call in calls] == [
        T - 1 if window is None else window - 1 for window in windows
    ]


def test_hook_point_window_kept_after_prune_and_load(tmp_path: Path) -> None:
    attached = hw.attach(BY_NAME["qwen2_windows"].build())
    small = hw.prune(attached, heads="1.*,2.4", fold_mean=False)
    assert [hook_point.window for hook_point in small.hook_points()] == [None, 5, 5]
    again: Any = hw.load(small.save_pretrained(tmp_path / "small"))
    assert [hook_point.window for hook_point in again.hook_points()] == [None, 5, 5]


def test_hook_point_encoder_decoder_has_no_window() -> None:
    assert {hook_point.window for hook_point in hw.attach(BY_NAME["bart"].build()).hook_points()} == {None}


def test_hook_point_full_layer_that_stores_a_window_has_none() -> None:
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 61,
    }
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Exaone4Config(**sizes, num_key_value_heads=2, sliding_window=5, layer_types=layer_types)
    attached = hw.attach(transformers.Exaone4ForCausalLM(config).eval())
    assert [hook_point.window for hook_point in attached.hook_points()] == [5, None, 5]


@pytest.mark.parametrize("name", ["mistral", "qwen2", "llama"])
def test_hook_point_window_native_equals_attached(name: str, tmp_path: Path) -> None:
    native, attached = hw.load(save_model(name, tmp_path)), hw.attach(BY_NAME[name].build())
    assert [hook_point.window for hook_point in native.hook_points()] == [
        hook_point.window for hook_point in attached.hook_points()
    ]


def test_hook_point_native_window_equals_layer_spec() -> None:
    model = make_model(MODELS["decoder, windows"])
    windows = [hook_point.window for hook_point in model.hook_points()]
    assert windows == [model.spec.attention_at(hook_point.address).window for hook_point in model.hook_points()]
    assert any(windows)
