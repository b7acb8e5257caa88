"""Access to the heads of transformers models that are not Headwise's own, through transformers' attention interface."""

from headwise.attached.api import attach
from headwise.attached.attached_model import AttachedModel
from headwise.attached.cache_policies import cached, per_head_cache

__all__ = ["AttachedModel", "attach", "cached", "per_head_cache"]
