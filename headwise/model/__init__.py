"""Whole networks."""

from headwise.model.block import Block
from headwise.model.model_cache import ModelCache
from headwise.model.protocols import AnyModel, check_model, quiet
from headwise.model.residual_stream import Norm, Step, Wiring
from headwise.model.resumable_forward import Stop, Walk
from headwise.model.sampling import Sampling
from headwise.model.transformer import Transformer

__all__ = [
    "AnyModel",
    "Block",
    "ModelCache",
    "Norm",
    "Sampling",
    "Step",
    "Stop",
    "Transformer",
    "Walk",
    "Wiring",
    "check_model",
    "quiet",
]
