"""Supported model families. Each has a conversion between config.json and spec, and a map of tensor names."""

from collections.abc import Mapping
from typing import Any

from headwise.errors import UnsupportedModelError
from headwise.weights.families import (
    albert,
    bert,
    deepseek,
    distilbert,
    gemma,
    gpt2,
    gpt_neo,
    llama,
    ministral3,
    modernbert,
    olmo2,
    phi3,
    qwen3,
    roberta,
    smollm3,
    t5,
)
from headwise.weights.families.family import ModelFamilySpec

FAMILIES: tuple[ModelFamilySpec, ...] = (
    gpt2.FAMILY,
    gpt_neo.FAMILY,
    bert.FAMILY,
    roberta.FAMILY,
    distilbert.FAMILY,
    albert.FAMILY,
    llama.FAMILY,
    t5.FAMILY,
    deepseek.FAMILY,
    qwen3.FAMILY,
    smollm3.FAMILY,
    phi3.FAMILY,
    ministral3.FAMILY,
    olmo2.FAMILY,
    gemma.GEMMA2_FAMILY,
    gemma.GEMMA3_FAMILY,
    modernbert.FAMILY,
)


EXPERT_SETTINGS = ("num_experts", "num_local_experts", "n_routed_experts")


def missing_part(config: Mapping[str, Any]) -> str:
    """Return the part of an architecture that Headwise does not implement, as far as config.json names it; "" otherwise."""
    config = config.get("text_config") or config
    experts = next((config[name] for name in EXPERT_SETTINGS if isinstance(config.get(name), int)), 0)
    kinds = config.get("layer_types") or ()
    parts = [f"mixture-of-experts MLPs ({experts} experts)"] if experts > 1 else []
    parts += ["linear attention layers"] if "linear_attention" in kinds else []
    return " and ".join(parts)


def family_of(model_type: str | None, config: Mapping[str, Any] | None = None) -> ModelFamilySpec:
    """Return the family of a `model_type` in config.json, or of an architecture in a GGUF file.

    Args:
        model_type: Name of the architecture.
        config: Configuration, from which an error names the missing part.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    missing = missing_part(config or {})
    reason = f", because Headwise does not implement its {missing}" if missing else ""
    supported = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UnsupportedModelError(
        f"model_type={model_type!r}: this architecture is not supported{reason}. Supported: {supported}. To load folders of "
        f"other families, install transformers: pip install 'headwise[attach]'"
    )


__all__ = ["FAMILIES", "ModelFamilySpec", "family_of", "missing_part"]
