"""Compression: pruning, quantization, streaming caches, plans. Functions return a changed model."""

from headwise.compression.allocate_bits import allocate_bits
from headwise.compression.cache_study import CacheStudyConfig, cache_study
from headwise.compression.plan import apply, plan_pruning, plan_streaming, prune
from headwise.compression.prune_request import PruneRequest
from headwise.compression.prune_study import PruneStudy, prune_study
from headwise.compression.pruning_curve import PruningCurves, pruning_curve
from headwise.compression.quantize import dequantize, quantize
from headwise.compression.streaming_selection import StreamingRequest

__all__ = [
    "CacheStudyConfig",
    "PruneRequest",
    "PruneStudy",
    "PruningCurves",
    "StreamingRequest",
    "allocate_bits",
    "apply",
    "cache_study",
    "dequantize",
    "plan_pruning",
    "plan_streaming",
    "prune",
    "prune_study",
    "pruning_curve",
    "quantize",
]
