"""Families that can be pruned, by name: a tiny random pruned model equals the model with silenced heads."""

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from bench.architectures import architectures
from bench.tried_cut import head_sets_to_prune
from bench.tried_with import build, outputs

transformers: Any = pytest.importorskip("transformers")

# By transformers' name of each: the full model, and its text model if it can be built alone.
FAMILIES = {
    "Gemma4": ("gemma4", "gemma4_text"), "Qwen3.5": ("qwen3_5", "qwen3_5_text"), "Mixtral": ("mixtral",),
    "Qwen-VL, its text": ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), "Qwen3-MoE": ("qwen3_moe",),
    "Phi3": ("phi3",), "OLMo2": ("olmo2",), "OLMo3": ("olmo3",), "GLM4": ("glm4",), "SmolLM3": ("smollm3",),
    "Granite": ("granite",), "T5": ("t5",), "ModernBERT": ("modernbert",), "XLM-R": ("xlm-roberta",), "ViT": ("vit",),
    "CLIP": ("clip",), "DINOv2": ("dinov2",), "Whisper": ("whisper",), "Falcon": ("falcon",), "DeBERTa-v2": ("deberta-v2",),
}  # fmt: skip
FIRST_LAYER_KEPT = ("t5",)  # the first layer computes the position bias of all layers, so it keeps a head


def build_double(name: str) -> tuple[Any, dict[str, Tensor]]:
    """Return a tiny model and its inputs in double precision, as far as its modules support it."""
    model, inputs = build(getattr(transformers, architectures()[name]), transformers.CONFIG_MAPPING[name])
    if any("expert" in part for part, _ in model.named_modules()):
        model.set_experts_implementation("eager")  # the grouped matmul does not support double precision
    return model.double(), {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in FAMILIES.items() for name in names])
def test_prune_family_equals_silenced_heads(family: str, name: str) -> None:
    model, inputs = build_double(name)
    full = outputs(model, inputs)
    with hw.attach(model) as attached:
        for heads in head_sets_to_prune(attached)[: 1 if name in FIRST_LAYER_KEPT else None]:
            with attached.heads.select(heads).silenced():
                silent = outputs(model, inputs)
            assert any((a - b).abs().max() > 1e-6 for a, b in zip(silent, full, strict=True)), "these heads matter"
            small = attached.prune(heads)
            assert not set(heads) & set(small.heads.addresses)
            for state in ("cut", "detached"):
                inner = small.model if state == "cut" else small.detach()
                for a, b in zip(outputs(inner, inputs), silent, strict=True):
                    assert (a - b).abs().max() <= 1e-9 * max(1.0, float(b.abs().max())), f"{family}, {state}: {heads}"
            assert all(map(torch.equal, outputs(model, inputs), full)), "and the first model is what it was"
