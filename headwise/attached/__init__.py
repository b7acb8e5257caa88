"""Access to the heads of transformers models that are not Headwise's own, through transformers' attention interface."""

from headwise.attached.api import attach
from headwise.attached.attached_model import AttachedModel

__all__ = ["AttachedModel", "attach"]
