"""Table of attention classes with a known norm in front of them.

Models with other classes can be attached, silenced and pruned, too, but weights of different layers are not compared.
"""

from dataclasses import dataclass

from torch import nn

from headwise.attached.discover import AttentionModuleInfo


@dataclass(frozen=True)
class AttentionNormPlacement:
    """Norms around a class of attention modules.

    Attributes:
        input_norm: Attribute of the parent that normalizes the input; None if the input is the residual stream itself.
        has_post_norm: Whether the output passes another norm before it is added to the residual stream.
    """

    input_norm: str | None
    has_post_norm: bool = False


_LLAMA_LIKE = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Phi3Attention", "GPTNeoXAttention",
          "GptOssAttention")  # fmt: skip
_POST_NORM = ("BertSelfAttention", "RobertaSelfAttention", "ElectraSelfAttention", "DistilBertSelfAttention", "BartAttention",
         "MarianAttention")  # fmt: skip
FAMILIES: dict[str, AttentionNormPlacement] = {
    **dict.fromkeys(_LLAMA_LIKE, AttentionNormPlacement("input_layernorm")),
    "Gemma3Attention": AttentionNormPlacement("input_layernorm", has_post_norm=True),
    **dict.fromkeys(_POST_NORM, AttentionNormPlacement(None)),
    **dict.fromkeys(("GPT2Attention", "GPTJAttention"), AttentionNormPlacement("ln_1")),
    "XGLMAttention": AttentionNormPlacement("self_attn_layer_norm"),
}


def norm_placement_of(info: AttentionModuleInfo) -> AttentionNormPlacement | None:
    """Return the norm placement of an attention module, or None if its class is unknown."""
    return FAMILIES.get(type(info.module).__name__)


def find_input_norm(info: AttentionModuleInfo) -> tuple[bool, nn.Module | None]:
    """Return whether the norm between residual stream and heads is known, and the norm itself (None: no norm)."""
    family = norm_placement_of(info)
    if family is None or family.has_post_norm:
        return False, None
    return True, None if family.input_norm is None else getattr(info.parent, family.input_norm)
