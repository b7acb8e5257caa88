"""A student learns from a teacher: from its logits, its states, where its heads look, how its q, k and v relate."""

from headwise.distillation.distill import distil
from headwise.distillation.distill_config import Lesson

__all__ = ["Lesson", "distil"]
