"""Heads of models that are not ours: any transformers model, reached through its attention interface."""

from headwise.attached.api import attach
from headwise.attached.attached_model import AttachedModel

__all__ = ["AttachedModel", "attach"]
