"""Multi-head attention layers whose heads are objects, and the hook points of their outputs."""

from headwise.heads.attention import MultiHeadAttention
from headwise.heads.head import Circuit, Head, Heads
from headwise.heads.head_dropout import HeadDropout
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.heads.initialize_parameters import initialize
from headwise.heads.per_head_output import PerHeadOutput
from headwise.heads.torch_mha import from_torch, to_torch

__all__ = [
    "AttentionCall",
    "Circuit",
    "Head",
    "HeadDropout",
    "Heads",
    "HookPoint",
    "MultiHeadAttention",
    "PerHeadOutput",
    "from_torch",
    "initialize",
    "to_torch",
]
