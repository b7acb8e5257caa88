"""DeepSeek-V2: generation, errors, and mixture-of-experts checkpoints, which are attached."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.weights import open_checkpoint
from tests.parity.cases import CASES, LAYERS, VOCAB, deepseek

BY_NAME = {case.name: case for case in CASES}
CASE = BY_NAME["deepseek-v2, direct queries"]


def test_deepseek_yarn_step_by_step_equals_transformers(tmp_path: Path) -> None:
    """Keys in the cache are rotated with positions far beyond the original context."""
    case = BY_NAME["deepseek-v2, yarn, equal mscale, query rank"]
    model: Any = hw.load(case.save(tmp_path))
    ids = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(3))
    cache = model.cache()
    with torch.no_grad():
        want = case.oracle(tmp_path)(ids).logits
        steps = [model(part, cache=cache) for part in ids.split([13, *[1] * 27], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek-v2, yarn", "deepseek-v2, linear rope, mscale"])
def test_deepseek_scores_scaled_by_yarn_equal_closed_form(name: str, tmp_path: Path) -> None:
    """The scores are scaled by (1 + 0.1 · mscale_all_dim · ln factor)² / √d, cosines by the ratio of both mscales."""
    case = BY_NAME[name]
    attention = open_checkpoint(case.save(tmp_path)).spec.attention
    rope = case.config["rope_parameters"]
    scaled = 1 + 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"])
    assert attention.scale == pytest.approx(scaled**2 / 10**0.5)
    assert attention.rotary is not None
    assert attention.rotary.scaling is not None
    ratio = (1 + 0.1 * rope["mscale"] * math.log(rope["factor"])) / scaled if "mscale" in rope else 1.0
    assert attention.rotary.scaling.cos_sin_factor == pytest.approx(ratio)


def test_export_deepseek_with_scale_that_no_mscale_gives_raises(tmp_path: Path) -> None:
    model: Any = hw.load(CASE.save(tmp_path / "theirs"))
    model = hw.Transformer(replace(model.spec, attention=replace(model.spec.attention, scale=0.5)))
    with pytest.raises(HeadwiseError, match="a custom attention scale"):
        hw.export(model, tmp_path / "out", family="deepseek-v2")


@pytest.mark.parametrize("name", ["deepseek-v2, direct queries", "deepseek-v2, yarn"])
def test_deepseek_generate_with_cache_equals_transformers(name: str, tmp_path: Path) -> None:
    """The original context of YaRN is 8 tokens, so texts become longer than it."""
    case = BY_NAME[name]
    model: Any = hw.load(case.save(tmp_path))
    ids = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
    want = case.oracle(tmp_path).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, eos_token_id=None
    )
    assert model.generate(ids, 9, stop=[]).tolist() == want.tolist()


def test_load_deepseek_with_experts_is_attached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = deepseek(
        "experts", first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        n_shared_experts=1, experts_implementation="eager",
    )  # fmt: skip
    model = hw.load(case.save(tmp_path))
    assert not model.is_native
    assert f"mixture-of-experts MLPs in layers 1 to {LAYERS - 1}" in capsys.readouterr().err
    assert len(model.spec.head_addresses) == 4 * LAYERS
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad(), model.heads["1.2"].silenced():
        silent = model(ids)
    with torch.no_grad():
        assert not torch.allclose(model(ids), silent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "2 KV heads for 4 heads"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rotary scaling 'dynamic'"),
        ({"qk_rope_head_dim": 3}, "dims=3: must be an even"),
    ],
)
def test_open_deepseek_unsupported_setting_raises(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = json.loads((CASE.save(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(HeadwiseError, match=message):
        open_checkpoint(tmp_path)
