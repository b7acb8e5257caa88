"""Supported model families. Each has a conversion between config.json and spec, and a map of tensor names."""

from headwise.errors import UnsupportedModelError
from headwise.weights.families import albert, bert, deepseek, distilbert, gpt2, gpt_neo, llama, roberta, t5
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
)


def family_of(model_type: str | None) -> ModelFamilySpec:
    """Return the family of a `model_type` in config.json, or of an architecture in a GGUF file."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise UnsupportedModelError(
        f"model_type={model_type!r}: this architecture is not supported. Supported: {supported}. To load folders of other "
        f"families, install transformers: pip install 'headwise[attach]'"
    )


__all__ = ["FAMILIES", "ModelFamilySpec", "family_of"]
