"""The families whose weights come in and go out: each a spec, a map of names, and a configuration both ways."""

from headwise.errors import HeadwiseError
from headwise.weights.families import bert, gpt2, gpt_neo, llama
from headwise.weights.families.family import ModelFamily

FAMILIES: tuple[ModelFamily, ...] = (gpt2.FAMILY, gpt_neo.FAMILY, bert.FAMILY, llama.FAMILY)


def family_of(model_type: str | None) -> ModelFamily:
    """The family of a `model_type` in a config.json, or of an architecture in a GGUF file."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise HeadwiseError(
        f"the architecture {model_type!r} is not one Headwise reads; supported: {supported}. With "
        f"transformers installed (headwise[attach]) folders of other families are attached to instead."
    )


__all__ = ["FAMILIES", "ModelFamily", "family_of"]
