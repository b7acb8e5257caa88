"""Room 8: weights change. A recipe, an order of reading, a loop, and checkpoints that survive anything."""

from headwise.train.loop import Trained, train
from headwise.train.recipe import Recipe

__all__ = ["Recipe", "Trained", "train"]
