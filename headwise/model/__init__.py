"""Room 4: whole networks."""

from headwise.model.block import Block
from headwise.model.cache import ModelCache
from headwise.model.sampling import Sampling
from headwise.model.transformer import Transformer

__all__ = ["Block", "ModelCache", "Sampling", "Transformer"]
