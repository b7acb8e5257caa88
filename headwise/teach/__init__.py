"""A student learns from a teacher: from its logits, its states, where its heads look, how its q, k and v relate."""

from headwise.teach.distil import distil
from headwise.teach.lesson import Lesson

__all__ = ["Lesson", "distil"]
