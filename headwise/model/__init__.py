"""Whole networks."""

from headwise.model.block import Block
from headwise.model.cache import ModelCache
from headwise.model.contract import AnyModel, quiet
from headwise.model.sampling import Sampling
from headwise.model.transformer import Transformer
from headwise.model.wiring import Norm, Step, Wiring, wiring_of

__all__ = ["AnyModel", "Block", "ModelCache", "Norm", "Sampling", "Step", "Transformer", "Wiring", "quiet", "wiring_of"]
