"""Choice of the next token from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import ArgumentError


@dataclass(frozen=True)
class Sampling:
    """Method to choose the next token.

    Attributes:
        temperature: 0 chooses the most likely token. A larger value divides the logits and samples.
        top_k: Sample from the `top_k` most likely tokens. None means all tokens.
        top_p: Sample from the most likely tokens with a total probability of `top_p`. None means all tokens.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ArgumentError(
                f"temperature={self.temperature}: must be 0 (the most likely token) or a positive finite number."
            )
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ArgumentError(
                f"temperature=0: does not sample, so top_k={self.top_k} and top_p={self.top_p} have no effect. "
                f"Set temperature=1.0, or omit top_k and top_p."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ArgumentError(f"top_k={self.top_k}: must be at least 1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ArgumentError(f"top_p={self.top_p}: must be above 0 and at most 1.")

    def pick(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Choose the next tokens: (B, V) → (B,).

        >>> Sampling().pick(torch.tensor([[0.1, 2.0, 0.3]]))
        tensor([1])
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator)[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities that `pick` samples from, (B, V). Rows sum to 1."""
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            threshold = logits.topk(self.top_k, -1).values[:, -1:]  # (B, 1)
            logits = logits.masked_fill(logits < threshold, -torch.inf)
        if self.top_p is not None:
            ordered, index = logits.sort(-1, descending=True)
            probs = ordered.softmax(-1)
            excluded = probs.cumsum(-1) - probs >= self.top_p  # more likely tokens already reach top_p
            logits = logits.masked_fill(torch.zeros_like(excluded).scatter(-1, index, excluded), -torch.inf)
        return logits.softmax(-1)
