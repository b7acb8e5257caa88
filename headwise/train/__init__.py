"""Weights change. A recipe, an order of reading, a loop, and checkpoints that survive anything."""

import sys
from types import ModuleType
from typing import Any

from headwise.train.loop import Trained, resume, train
from headwise.train.recipe import Recipe

__all__ = ["Recipe", "Trained", "resume", "train"]


class _Room(ModuleType):
    """Python binds `headwise.train` to this module once any file of it is imported; calling it must still train."""

    def __call__(self, *arguments: Any, **named: Any) -> Trained:
        return train(*arguments, **named)


sys.modules[__name__].__class__ = _Room
