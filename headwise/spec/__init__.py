"""Model configuration: frozen dataclasses that do not import torch."""

from headwise.spec.address import (
    Address,
    EmbeddingOrLogitsAddress,
    HeadInputAddress,
    KVAddress,
    LayerAddress,
    MLPAddress,
    NodeAddress,
    parse_node,
    select,
)
from headwise.spec.attention import AttentionSpec, Latent, QKNorm, QueryScaling, Rotary, RotaryScaling
from headwise.spec.cache_policy import CachePolicy, CacheRule
from headwise.spec.json_spec import JSONSpec
from headwise.spec.model import ModelSpec
from headwise.spec.plan import Plan
from headwise.spec.presets import preset, presets
from headwise.spec.weight_bits import LayerBits, WeightRule

__all__ = [
    "Address",
    "AttentionSpec",
    "CachePolicy",
    "CacheRule",
    "EmbeddingOrLogitsAddress",
    "HeadInputAddress",
    "JSONSpec",
    "KVAddress",
    "Latent",
    "LayerAddress",
    "LayerBits",
    "MLPAddress",
    "ModelSpec",
    "NodeAddress",
    "Plan",
    "QKNorm",
    "QueryScaling",
    "Rotary",
    "RotaryScaling",
    "WeightRule",
    "parse_node",
    "preset",
    "presets",
    "select",
]
