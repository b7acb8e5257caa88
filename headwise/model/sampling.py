"""Choosing the next token from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import HeadwiseError


@dataclass(frozen=True)
class Sampling:
    """How to choose: the best token (temperature 0), or at random among the top_k best and the top_p share of mass."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise HeadwiseError(f"temperature must be 0 (the best token) or more, got {self.temperature}.")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise HeadwiseError(
                "top_k and top_p say how to draw, but temperature 0 does not draw; give temperature=1.0."
            )
        if self.top_k is not None and self.top_k < 1:
            raise HeadwiseError(f"top_k must be at least 1, got {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise HeadwiseError(f"top_p must lie above 0 and at most 1, got {self.top_p}.")

    def pick(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """(B, V) → (B,)

        >>> Sampling().pick(torch.tensor([[0.1, 2.0, 0.3]]))
        tensor([1])
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator)[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """What `pick` draws from: (B, V), rows sum to 1."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            threshold = logits.topk(self.top_k, -1).values[:, -1:]  # (B, 1)
            logits = logits.masked_fill(logits < threshold, -torch.inf)
        if self.top_p is not None:
            ordered, index = logits.sort(-1, descending=True)
            probs = ordered.softmax(-1)
            excluded = probs.cumsum(-1) - probs >= self.top_p  # the tokens before it already hold enough
            logits = logits.masked_fill(torch.zeros_like(excluded).scatter(-1, index, excluded), -torch.inf)
        return logits.softmax(-1)
