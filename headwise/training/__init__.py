"""Weights change. A recipe, an order of reading, a loop, and checkpoints that survive anything."""

import sys
from types import ModuleType
from typing import Any

from headwise.training.loop import Trained, resume, start, train
from headwise.training.recipe import Recipe
from headwise.training.request import TrainRequest

__all__ = ["Recipe", "TrainRequest", "Trained", "resume", "start", "train"]


class _Room(ModuleType):
    """Python binds `headwise.training` to this module once any file of it is imported; calling it must still train."""

    def __call__(self, *arguments: Any, **named: Any) -> Trained:
        return train(*arguments, **named)


sys.modules[__name__].__class__ = _Room
