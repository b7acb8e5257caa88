"""What is known of attention modules by their class: the norm before them.

A class that is not here can be looked at, silenced and cut like any other; weights of different layers are not compared.
"""

from dataclasses import dataclass

from torch import nn

from headwise.attached.discover import AttentionModuleInfo


@dataclass(frozen=True)
class AttentionNormPlacement:
    """One class of attention modules, or several that are alike."""

    input_norm: str | None  # the norm that heads read through, in the parent; None: they read the stream as it is
    has_post_norm: bool = False  # whether what is written passes another norm before it reaches the stream


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
    """What is known of one attention module."""
    return FAMILIES.get(type(info.module).__name__)


def find_input_norm(info: AttentionModuleInfo) -> tuple[bool, nn.Module | None]:
    """Whether it is known what stands between the stream and what heads read; and it, if anything does."""
    family = norm_placement_of(info)
    if family is None or family.has_post_norm:
        return False, None
    return True, None if family.input_norm is None else getattr(info.parent, family.input_norm)
