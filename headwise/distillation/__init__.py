"""A student learns from a teacher: from its logits, its states, where its heads look, how its q, k and v relate."""

from headwise.distillation.distill import distill, distill_loss_factory
from headwise.distillation.distill_config import DistillConfig

__all__ = ["DistillConfig", "distill", "distill_loss_factory"]
