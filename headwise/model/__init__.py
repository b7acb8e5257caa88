"""Whole networks."""

from headwise.model.block import Block
from headwise.model.cache import ModelCache
from headwise.model.contract import AnyModel, check_model, quiet
from headwise.model.sampling import Sampling
from headwise.model.transformer import Transformer
from headwise.model.walk import Stop, Walk
from headwise.model.wiring import Norm, Step, Wiring

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
