"""Anyone's model, its heads reached through transformers' attention interface."""

import sys
from types import ModuleType
from typing import Any

from headwise.attached.api import attach
from headwise.attached.attached_model import Attached

__all__ = ["Attached", "attach"]


class _Room(ModuleType):
    """Python binds `headwise.attached` to this module once any file of it is imported; calling it must still attach."""

    def __call__(self, *arguments: Any, **named: Any) -> Attached:
        return attach(*arguments, **named)


sys.modules[__name__].__class__ = _Room
