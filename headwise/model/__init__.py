"""Room 4: whole networks."""

from headwise.model.block import Block
from headwise.model.cache import ModelCache
from headwise.model.sampling import Sampling
from headwise.model.transformer import Transformer
from headwise.model.whose import AnyModel, ours

__all__ = ["AnyModel", "Block", "ModelCache", "Sampling", "Transformer", "ours"]
