"""KV caches: one for all KV heads of a layer, or one per head, and the caches of a model."""

from headwise.cache.layer_cache import (
    NO_CACHE,
    AttendResult,
    CacheState,
    CrossAttentionCache,
    DynamicCache,
    LayerCache,
    NoCache,
    SharedKVCache,
    SlidingWindowCache,
    StaticCache,
)
from headwise.cache.model_cache import ModelCache
from headwise.cache.per_head_cache import PerHeadCache
from headwise.cache.prefix_cache import PrefixModelCache

__all__ = [
    "NO_CACHE",
    "AttendResult",
    "CacheState",
    "CrossAttentionCache",
    "DynamicCache",
    "LayerCache",
    "ModelCache",
    "NoCache",
    "PerHeadCache",
    "PrefixModelCache",
    "SharedKVCache",
    "SlidingWindowCache",
    "StaticCache",
]
