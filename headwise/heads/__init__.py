"""The head as an object."""

from headwise.heads.attention import MultiHeadAttention
from headwise.heads.head import Circuit, Head, Heads
from headwise.heads.head_dropout import HeadDropout
from headwise.heads.hook_point import AttentionCall, HookPoint
from headwise.heads.initialize_weights import initialize
from headwise.heads.layer_cache import CrossAttentionCache, DynamicCache, LayerCache, SlidingWindowCache, StaticCache
from headwise.heads.per_head_cache import PerHeadCache
from headwise.heads.per_head_output import PerHeadOutput
from headwise.heads.torch_mha import from_torch, to_torch

__all__ = [
    "AttentionCall",
    "Circuit",
    "CrossAttentionCache",
    "DynamicCache",
    "Head",
    "HeadDropout",
    "Heads",
    "HookPoint",
    "LayerCache",
    "MultiHeadAttention",
    "PerHeadCache",
    "PerHeadOutput",
    "SlidingWindowCache",
    "StaticCache",
    "from_torch",
    "initialize",
    "to_torch",
]
