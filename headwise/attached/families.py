"""What is known of attention modules by their class: the norm before them.

A class that is not here can be looked at, silenced and cut like any other; weights of different layers are not compared.
"""

from dataclasses import dataclass

from torch import nn

from headwise.attached.discover import FoundAttention


@dataclass(frozen=True)
class AttentionFamily:
    """One class of attention modules, or several that are alike."""

    norm: str | None  # the norm that heads read through, in the parent; None: they read the stream as it is
    one_more_norm: bool = False  # whether what is written passes another norm before it reaches the stream


_LLAMA = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "Phi3Attention", "GPTNeoXAttention",
          "GptOssAttention")  # fmt: skip
_NONE = ("BertSelfAttention", "RobertaSelfAttention", "ElectraSelfAttention", "DistilBertSelfAttention", "BartAttention",
         "MarianAttention")  # fmt: skip
FAMILIES: dict[str, AttentionFamily] = {
    **dict.fromkeys(_LLAMA, AttentionFamily("input_layernorm")),
    "Gemma3Attention": AttentionFamily("input_layernorm", one_more_norm=True),
    **dict.fromkeys(_NONE, AttentionFamily(None)),
    **dict.fromkeys(("GPT2Attention", "GPTJAttention"), AttentionFamily("ln_1")),
    "XGLMAttention": AttentionFamily("self_attn_layer_norm"),
}


def family_of(found: FoundAttention) -> AttentionFamily | None:
    """What is known of one attention module."""
    return FAMILIES.get(type(found.module).__name__)


def norm_before(found: FoundAttention) -> tuple[bool, nn.Module | None]:
    """Whether it is known what stands between the stream and what heads read; and it, if anything does."""
    family = family_of(found)
    if family is None or family.one_more_norm:
        return False, None
    return True, None if family.norm is None else getattr(found.parent, family.norm)
