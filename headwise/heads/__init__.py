"""The head as an object."""

from headwise.heads.attention import MultiHeadAttention
from headwise.heads.dropout import HeadDropout
from headwise.heads.head import Circuit, Head, Heads
from headwise.heads.hook_point import Seen, Site
from headwise.heads.init import initialise
from headwise.heads.layer_cache import Cache, FixedCache, GrowingCache, SlidingCache, SourceCache
from headwise.heads.per_head_cache import HeadCache
from headwise.heads.per_head_output import PerHead
from headwise.heads.torch_mha import from_torch, to_torch

__all__ = [
    "Cache",
    "Circuit",
    "FixedCache",
    "GrowingCache",
    "Head",
    "HeadCache",
    "HeadDropout",
    "Heads",
    "MultiHeadAttention",
    "PerHead",
    "Seen",
    "Site",
    "SlidingCache",
    "SourceCache",
    "from_torch",
    "initialise",
    "to_torch",
]
