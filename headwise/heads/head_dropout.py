"""Head dropout: in training, whole heads fall silent at random, so that no head is leaned on too much.

(https://arxiv.org/abs/2004.13342.) Kept heads are rescaled by H / kept, so the expected output is the plain sum; at least
one head is kept; in evaluation nothing happens.
"""

import torch
from torch import Tensor, nn

from headwise.errors import HeadwiseError


class HeadDropout(nn.Module):
    """Draws a gate per (example, head). `schedule` bends the rate over training.

    constant: the rate throughout; ramp: from 0 up to the rate; v: from the rate down to 0 at half-way and up again.
    """

    def __init__(self, rate: float, schedule: str = "constant") -> None:
        super().__init__()
        self.max_rate, self.schedule = rate, schedule
        self.rate = rate
        self.set_progress(0.0)

    def set_progress(self, fraction: float) -> None:
        """Set the rate for a share of training done, 0 to 1."""
        if not 0 <= fraction <= 1:
            raise HeadwiseError(f"progress is the share of training done, 0 to 1; got {fraction}.")
        multipliers = {"constant": 1.0, "ramp": fraction, "v": abs(1 - 2 * fraction)}
        self.rate = self.max_rate * multipliers[self.schedule]

    def sample_gate(self, B: int, H: int, like: Tensor) -> Tensor | None:
        """A gate for each example and head, (B, H); None where nothing is dropped."""
        if not self.training or self.rate == 0 or H == 0:
            return None
        return head_dropout_gate(B, H, self.rate, like)

    def forward(self, z: Tensor) -> Tensor:
        """Silence whole heads of each example: (B, H, T, e)."""
        gate = self.sample_gate(z.shape[0], z.shape[1], z)
        return z if gate is None else z * gate[..., None, None]


def set_training_progress(model: nn.Module, fraction: float) -> None:
    """Tell whatever drops heads in a model which share of training is done, 0 to 1; most models have nothing that does.

    >>> layer = HeadDropout(0.4, "ramp")
    >>> set_training_progress(nn.Sequential(layer), 0.5)
    >>> layer.rate
    0.2
    """
    for module in model.modules():
        if isinstance(module, HeadDropout):
            module.set_progress(fraction)


def head_dropout_gate(B: int, H: int, rate: float, like: Tensor) -> Tensor:
    """A random gate (B, H): 0 for dropped heads, H / kept for the others; never all dropped.

    >>> gate = head_dropout_gate(5, 4, 0.9, torch.zeros(1))
    >>> gate.sum(1)
    tensor([4., 4., 4., 4., 4.])
    """
    noise = torch.rand(B, H, device=like.device)
    keep = (noise >= rate) | (noise == noise.amax(1, keepdim=True))  # the luckiest head stays
    return (keep * (H / keep.sum(1, keepdim=True))).to(like.dtype)
