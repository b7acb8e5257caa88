"""Redundancy and self-repair on models whose heads are redundant, additive or repaired by construction."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.analysis.circuits.circuit_result import CircuitEstimate
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from tests.analysis.constructed_heads import BETA, FILLERS, OUT, PREVIOUS, SCRATCH, HeadBuilder, V, blank_model
from tests.analysis.test_edge_effects import Identity
from tests.attached.models import BY_NAME

# The answer is the word before the last. All words are fillers without a fixed follower.
WORDS = FILLERS[1::2]
PROMPTS: list[dict[str, str]] = [
    {
        "clean": f"{WORDS[-1]} {WORDS[i]} {WORDS[-2]}",
        "corrupted": f"{WORDS[-1]} {WORDS[i + 4]} {WORDS[-2]}",
        "right": f" {WORDS[i]}",
        "wrong": f" {WORDS[i + 4]}",
        "template": str(i % 4),
    }
    for i in range(8)
]


class Readout(nn.Module):
    """MLP that writes min(x, 1) of the scratch channels to the logits."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[..., OUT : OUT + V] = x[..., SCRATCH : SCRATCH + V].clamp(max=1)
        return out


def built_model(layers: int) -> tuple[Transformer, list[Any]]:
    model = blank_model(heads=3, layers=layers).double()
    model.norm = Identity()
    for block in model.blocks:
        block.norm_attention.eps = 0.0  # pyright: ignore  # so that effects are exactly the sizes that heads write
    return model, list(model.attention_layers())


def test_redundancy_of_identical_heads_with_saturating_readout_is_complete() -> None:
    """Each head alone saturates the readout: no effect alone, the full effect together."""
    model, (layer,) = built_model(1)
    for head in (0, 1):
        HeadBuilder(layer, head).attend_offsets(1).write(SCRATCH, 1.0)
    model.blocks[0].norm_mlp, model.blocks[0].mlp = Identity(), Readout()
    result = hw.redundancy(model, PROMPTS, "0.0,0.1", ablation="zero", progress=False)
    assert result.clean_metric == pytest.approx(1, abs=1e-6)
    for head in result.heads:
        assert head.live.value == pytest.approx(0, abs=1e-6)
    pair = result.pair("0.1", "0.0")
    assert pair.joint.live.value == pytest.approx(1, abs=1e-6)
    assert pair.redundant_share.value == pytest.approx(1, abs=1e-6)
    assert pair.redundant_share.low == pytest.approx(1, abs=1e-6)
    assert pair.interaction_direct.value == pytest.approx(0, abs=1e-6), "with the MLP frozen, nothing saturates"


def test_redundancy_of_independent_heads_is_zero() -> None:
    """Two heads write the answer to the logits with sizes 1 and 0.5, which add up."""
    model, (layer,) = built_model(1)
    HeadBuilder(layer, 0).attend_offsets(1).write(OUT, 1.0)
    HeadBuilder(layer, 1).attend_offsets(1).write(OUT, 0.5)
    result = hw.redundancy(model, PROMPTS, "0.0,0.1", ablation="zero", progress=False)
    assert [head.live.value for head in result.heads] == pytest.approx([1, 0.5], abs=1e-6)
    assert [head.repaired_by_heads.value for head in result.heads] == pytest.approx([0, 0], abs=1e-6)
    pair = result.pairs[0]
    assert (pair.joint.live.value, pair.interaction.value) == pytest.approx((1.5, 0), abs=1e-6)
    assert pair.redundant_share.value == pytest.approx(0, abs=1e-6)
    resampled = hw.redundancy(model, PROMPTS, "0.0,0.1", progress=False)
    assert [head.live.value for head in resampled.heads] == pytest.approx([2, 1], abs=1e-6)


def test_redundancy_of_backup_head_is_repaired() -> None:
    """Head 1.0 writes the answer only if head 0.0 does not write: it attends to the first token if 0.0 has written."""
    model, (first, second) = built_model(2)
    HeadBuilder(first, 0).attend_offsets(1).write(OUT, 1.0)
    HeadBuilder(first, 1).attend_offsets(1).write(PREVIOUS, 0.0)
    backup = HeadBuilder(second, 0).attend_offsets(1)
    backup.W_Q[OUT : OUT + V, V] += 4 * BETA
    backup.write(OUT, 1.0)
    result = hw.redundancy(model, PROMPTS, "0.0,1.0", ablation="zero", progress=False)
    main, spare = result.heads
    assert main.direct.value == pytest.approx(1, abs=1e-6)
    assert main.heads_frozen.value == pytest.approx(1, abs=1e-6)
    assert main.live.value == pytest.approx(0, abs=1e-6)
    assert main.repaired_by_heads.value == pytest.approx(1, abs=1e-6)
    assert main.repaired_by_heads.low == pytest.approx(1, abs=1e-6)
    assert spare.live.value == pytest.approx(0, abs=1e-6)
    pair = result.pairs[0]
    assert pair.joint.live.value == pytest.approx(1, abs=1e-6)
    assert pair.redundant_share.value == pytest.approx(1, abs=1e-6)


@torch.no_grad()
def test_redundancy_live_effects_equal_patched_heads() -> None:
    """On a random model, in which nothing is special. The frozen effects equal pinned heads and paths to the logits."""
    model, _ = built_model(2)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.norm = nn.LayerNorm(model.spec.width).double()
    result = hw.redundancy(model, PROMPTS, "0.0,1.2", progress=False)
    encode = model.tokenizer.encode  # pyright: ignore[reportOptionalMemberAccess]
    live, direct = [], []
    for prompt in PROMPTS:
        clean, other = (torch.tensor([encode(prompt[name])]) for name in ("clean", "corrupted"))
        right, wrong = (encode(prompt[name].strip())[-1] for name in ("right", "wrong"))

        def metric(right: int = right, wrong: int = wrong, clean: Tensor = clean) -> float:
            logits = model(clean)[0, -1]
            return float(logits[right] - logits[wrong])

        base = metric()
        with hw.patched(model, "0.0", other):
            live.append(base - metric())
        with hw.patched(model, path=("0.0", "logits"), other=other):
            direct.append(base - metric())
    assert result.heads[0].live.value == pytest.approx(sum(live) / len(live), abs=1e-9)
    assert result.heads[0].direct.value == pytest.approx(sum(direct) / len(direct), abs=1e-9)
    assert result.heads[0].live.low <= result.heads[0].live.value <= result.heads[0].live.high
    last = result.heads[1]
    assert last.repaired_by_heads.value == pytest.approx(0, abs=1e-12), "no head comes later"


def test_redundancy_result_prints_and_writes_json(tmp_path: Path) -> None:
    model, (layer,) = built_model(1)
    HeadBuilder(layer, 0).attend_offsets(1).write(OUT, 1.0)
    result = hw.redundancy(model, PROMPTS, "0.0,0.1", ablation="zero", progress=False)
    assert "8 prompts of 4 templates" in repr(result)
    assert "<table" in result._repr_html_()
    data = json.loads(result.to_json(tmp_path / "redundancy.json"))
    assert data == json.loads((tmp_path / "redundancy.json").read_text())
    assert data["heads"][0]["live"]["value"] == pytest.approx(1, abs=1e-6)
    assert isinstance(result.pairs[0].redundant_share, CircuitEstimate)


def test_redundancy_of_attached_model_runs() -> None:
    attached = hw.attach(BY_NAME["gemma3"].build(), tokenizer=blank_model(heads=1, layers=1).tokenizer)
    prompts = [
        {**prompt, "clean": "w1x 1 w3x", "corrupted": "w1x 2 w3x", "right": " 1", "wrong": " 2"} for prompt in PROMPTS
    ]
    result = hw.redundancy(attached, prompts, "0.1,0.2,1.0", progress=False)
    assert len(result.pairs) == 3
    assert abs(result.heads[0].live.value) > 0


def test_redundancy_invalid_arguments_raise() -> None:
    model, _ = built_model(2)
    cases: list[tuple[Any, Any, str]] = [
        ("0.9", {}, "no such head"),
        ("0.0", {"ablation": "mean"}, "must be 'resample' or 'zero'"),
        ([], {}, "must select 1 to 16 heads"),
    ]
    for heads, options, message in cases:
        with pytest.raises(HeadwiseError, match=message):
            hw.redundancy(model, PROMPTS, heads, progress=False, **options)
    result = hw.redundancy(model, PROMPTS, "0.0,0.1", progress=False)
    with pytest.raises(HeadwiseError, match=r"were not measured together. Measured: 0\.0\+0\.1"):
        result.pair("0.0", "1.1")
