"""Distillation: train a student on the logits, hidden states, attention maps or q/k/v relations of a teacher."""

from headwise.distillation.distill import distill, distill_loss_factory
from headwise.distillation.distill_config import DistillConfig

__all__ = ["DistillConfig", "distill", "distill_loss_factory"]
