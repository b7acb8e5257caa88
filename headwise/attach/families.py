"""What is known of attention modules by their class: the norm before them, and what cutting heads must keep true in them.

A class that is not here can be looked at and silenced like any other. Its heads cannot be cut, and weights of different
layers are not compared.
"""

from dataclasses import dataclass

from torch import nn

from headwise.attach.find import Found


@dataclass(frozen=True)
class Family:
    """One class of attention modules, or several that are alike."""

    norm: str | None  # the norm that heads read through, in the parent; None: they read the stream as it is
    heads: tuple[str, ...] = ()  # attributes that count heads
    channels: tuple[str, ...] = ()  # attributes that count heads times channels
    cut: bool = False  # whether heads can be cut: forward takes the number of heads from the shape of what is projected
    one_more_norm: bool = False  # whether what is written passes another norm before it reaches the stream


_LLAMA = Family("input_layernorm", cut=True)
_BERT = Family(None, heads=("num_attention_heads",), channels=("all_head_size",), cut=True)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"), _LLAMA),
    "Gemma3Attention": Family("input_layernorm", cut=True, one_more_norm=True),
    **dict.fromkeys(("BertSelfAttention", "RobertaSelfAttention", "ElectraSelfAttention"), _BERT),
    "DistilBertSelfAttention": Family(None, heads=("n_heads",), channels=("dim",), cut=True),
    **dict.fromkeys(("BartAttention", "MarianAttention"), Family(None, heads=("num_heads",), cut=True)),
    "GPT2Attention": Family("ln_1", heads=("num_heads",), channels=("split_size",), cut=True),
    "Phi3Attention": Family("input_layernorm"),
    "GPTNeoXAttention": Family("input_layernorm"),
}


def family_of(found: Found) -> Family | None:
    """What is known of one attention module."""
    return FAMILIES.get(type(found.module).__name__)


def norm_before(found: Found) -> tuple[bool, nn.Module | None]:
    """Whether it is known what stands between the stream and what heads read; and it, if anything does."""
    family = family_of(found)
    if family is None or family.one_more_norm:
        return False, None
    return True, None if family.norm is None else getattr(found.parent, family.norm)
