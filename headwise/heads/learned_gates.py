"""Hard-concrete gates: random numbers that are often exactly 0 or 1, but differentiable in their location log α.

https://arxiv.org/abs/1712.01312
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

BETA, GAMMA, ZETA = (
    0.33,
    -0.1,
    1.1,
)  # temperature, and the interval to which gates are stretched before clipping to [0, 1]
INITIAL_LOG_ALPHA = 2.0  # nearly all gates are open at the start


class LearnedGates(nn.Module):
    """Hard-concrete gates of N units, such as heads. The parameter `log_alpha` (N,) is ordered by group, such as a layer.

    >>> from headwise.spec import LayerAddress
    >>> gates = LearnedGates({LayerAddress("", 0): 4, LayerAddress("", 1): 2}, initial_log_alpha=0.0)
    >>> {str(layer): tuple(gate.shape) for layer, gate in gates.sample(3).items()}
    {'0': (3, 4), '1': (3, 2)}
    >>> round(gates.open_fraction().item(), 3), gates.deterministic_gates()[LayerAddress("", 1)].tolist()
    (0.688, [0.5, 0.5])
    """

    def __init__(self, heads: Mapping[Any, int], initial_log_alpha: float = INITIAL_LOG_ALPHA) -> None:
        super().__init__()
        self.heads = dict(heads)
        self.log_alpha = nn.Parameter(torch.full((sum(self.heads.values()),), initial_log_alpha, dtype=torch.float32))

    def sample(self, B: int) -> dict[Any, Tensor]:
        """Sample gates for B texts, (B, H) for each group, differentiable in log α."""
        u = torch.rand(B, len(self.log_alpha), device=self.log_alpha.device, dtype=torch.float32)  # (B, N)
        noise = u.logit(eps=torch.finfo(u.dtype).eps)  # log u − log(1 − u)
        return self._stretch_clip_and_split(torch.sigmoid((noise + self.log_alpha) / BETA))

    def deterministic_gates(self) -> dict[Any, Tensor]:
        """Return gates without noise, (H,) for each group: 0 if log α is below −2.398, 1 if it is above 2.398."""
        return self._stretch_clip_and_split(torch.sigmoid(self.log_alpha))

    def open_probability(self) -> Tensor:
        """Return the probability that a sampled gate is not 0, (N,)."""
        return torch.sigmoid(self.log_alpha - BETA * math.log(-GAMMA / ZETA))

    def open_fraction(self) -> Tensor:
        """Return the expected fraction of open gates."""
        return self.open_probability().mean()

    @torch.no_grad()
    def set_open_fraction(self, fraction: float) -> None:
        """Shift all log α by the same amount, so that this fraction of gates is expected to be open."""
        low, high = -100.0, 100.0
        start = self.log_alpha.clone()
        for _ in range(50):  # bisection: the fraction is monotonic in the shift
            shift = (low + high) / 2
            self.log_alpha.copy_(start + shift)
            low, high = (shift, high) if self.open_fraction().item() < fraction else (low, shift)

    def _stretch_clip_and_split(self, gates: Tensor) -> dict[Any, Tensor]:
        """Stretch gates to [GAMMA, ZETA], clip them to [0, 1] and split them by group: (…, N) → (…, H) each."""
        clipped = (gates * (ZETA - GAMMA) + GAMMA).clamp(0, 1)
        return dict(zip(self.heads, clipped.split(list(self.heads.values()), -1), strict=True))


def add_sparsity_gradient(gates: LearnedGates) -> None:
    """Add λ · ∂ Σ P(open) / ∂ log α to the gradient, with λ such that the sum of open probabilities does not change.

    λ is the Lagrange multiplier of the constraint on the number of open gates, computed from the gradients of this step, so
    that it is not a hyperparameter. Gates of heads that lower the loss by more than λ open, and the others close.
    """
    grad = gates.log_alpha.grad  # (N,)
    assert grad is not None
    open_probability = gates.open_probability().detach()
    probability_grad = open_probability * (1 - open_probability)  # ∂ Σ P(open) / ∂ log α, (N,)
    multiplier = -(grad @ probability_grad) / (probability_grad @ probability_grad).clamp(min=1e-12)
    grad += multiplier * probability_grad
