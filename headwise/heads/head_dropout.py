"""Head dropout (https://arxiv.org/abs/2004.13342): entire heads are dropped at random in training.

The remaining heads are rescaled by H / remaining, so that the expected output is the sum over all heads. At least one head
remains. Head dropout has no effect in evaluation mode.
"""

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError


class HeadDropout(nn.Module):
    """Drop entire heads at random, independently for each example.

    Args:
        rate: Dropout rate.
        schedule: Rate over the course of training. "constant" uses `rate` throughout, "ramp" rises linearly from 0 to
            `rate`, "v" falls from `rate` to 0 at half of training and rises to `rate` again.
    """

    def __init__(self, rate: float, schedule: str = "constant") -> None:
        super().__init__()
        self.max_rate, self.schedule = rate, schedule
        self.rate = rate
        self.set_progress(0.0)

    def set_progress(self, fraction: float) -> None:
        """Set the rate for the completed fraction of training, 0 to 1."""
        if not 0 <= fraction <= 1:
            raise ArgumentError(f"fraction={fraction}: the completed fraction of training must be between 0 and 1.")
        multipliers = {"constant": 1.0, "ramp": fraction, "v": abs(1 - 2 * fraction)}
        self.rate = self.max_rate * multipliers[self.schedule]

    def sample_gate(self, B: int, H: int, like: Tensor) -> Tensor | None:
        """Draw a gate for each example and head, (B, H). Return None if no head can be dropped."""
        if not self.training or self.rate == 0 or H == 0:
            return None
        return head_dropout_gate(B, H, self.rate, like)

    def forward(self, z: Tensor) -> Tensor:
        """Drop heads of each example: (B, H, T, e) → (B, H, T, e)."""
        gate = self.sample_gate(z.shape[0], z.shape[1], z)
        return z if gate is None else z * gate[..., None, None]


def set_training_progress(model: nn.Module, fraction: float) -> None:
    """Set the completed fraction of training, 0 to 1, in all head dropout modules of a model.

    >>> layer = HeadDropout(0.4, "ramp")
    >>> set_training_progress(nn.Sequential(layer), 0.5)
    >>> layer.rate
    0.2
    """
    for module in model.modules():
        if isinstance(module, HeadDropout):
            module.set_progress(fraction)


def head_dropout_gate(B: int, H: int, rate: float, like: Tensor) -> Tensor:
    """Draw a random gate (B, H): 0 for dropped heads, H / remaining for the others. At least one head remains.

    >>> gate = head_dropout_gate(5, 4, 0.9, torch.zeros(1))
    >>> gate.sum(1)
    tensor([4., 4., 4., 4., 4.])
    """
    noise = torch.rand(B, H, device=like.device, dtype=torch.float32)
    keep = (noise >= rate) | (noise == noise.amax(1, keepdim=True))  # the head with the largest noise always remains
    return (keep * (H / keep.sum(1, keepdim=True))).to(like.dtype)
