"""Gate of z that is computed from the input of each token (https://arxiv.org/abs/2505.06708)."""

import torch
from torch import Tensor, nn

from headwise.kernels.matmul_tuner import linear
from headwise.spec import AttentionSpec


class OutputGate(nn.Module):
    """Sigmoid gate of z: one number per head and token, or one per channel.

    In memory and in state dicts the weight is (H, 1 or e, D). Attention is linear in v, so a gate per head equals a factor of
    the head's attention weights.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        heads, channels = len(spec.head_ids), spec.value_dim if spec.output_gate == "channel" else 1
        self.weight = nn.Parameter(torch.empty(heads, channels, spec.width))
        self.bias = nn.Parameter(torch.empty(heads, channels)) if spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the gates of the tokens, between 0 and 1: (B, T, D) → (B, H, T, 1 or e)."""
        bias = None if self.bias is None else self.bias.flatten()
        logits = linear(x, self.weight.flatten(0, 1), bias)  # (B, T, H or H·e)
        return torch.sigmoid(logits).unflatten(-1, self.weight.shape[:2]).transpose(1, 2)
