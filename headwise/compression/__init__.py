"""Compression: pruning, quantization, streaming caches, plans. Functions return a changed model."""

from headwise.compression.allocate_bits import allocate_bits
from headwise.compression.cache_study import CacheStudy, cache_study
from headwise.compression.plan import Plan, apply, plan_pruning, plan_streaming
from headwise.compression.prune import prune
from headwise.compression.prune_request import PruneRequest
from headwise.compression.prune_study import PruneStudy, prune_study
from headwise.compression.quantize import dequantize, quantize

__all__ = [
    "CacheStudy",
    "Plan",
    "PruneRequest",
    "PruneStudy",
    "allocate_bits",
    "apply",
    "cache_study",
    "dequantize",
    "plan_pruning",
    "plan_streaming",
    "prune",
    "prune_study",
    "quantize",
]
