"""Transformer models: blocks, generation, pruning, and the interface that native and attached models share."""

from headwise.model.block import Block
from headwise.model.protocols import ModelProtocol, check_model, eval_mode
from headwise.model.residual_stream import LinearizedNorm, ResidualLayerModules, ResidualStream
from headwise.model.resumable_forward import LayerCheckpoint, ResumableForward
from headwise.model.sampling import Sampling
from headwise.model.transformer import Transformer

__all__ = [
    "Block",
    "LayerCheckpoint",
    "LinearizedNorm",
    "ModelProtocol",
    "ResidualLayerModules",
    "ResidualStream",
    "ResumableForward",
    "Sampling",
    "Transformer",
    "check_model",
    "eval_mode",
]
