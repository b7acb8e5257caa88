"""Which tokens a step reads. It follows from the seed and the step alone, so a run can go on from any step."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from headwise.errors import HeadwiseError

IGNORE = -100  # a target that is not asked for


@dataclass(frozen=True)
class Windows:
    """A row of tokens cut into windows of `context` tokens, each token once an epoch, shuffled anew in every epoch.

    >>> windows = Windows(np.arange(10), context=3, seed=0)
    >>> windows.count, windows.rows(0, 2).shape
    (2, (2, 4))
    """

    tokens: np.ndarray
    context: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) < self.context + 1:
            raise HeadwiseError(
                f"the text has {len(self.tokens)} tokens to train on, fewer than a context of {self.context} and the one "
                f"behind it; give more text or a shorter context."
            )

    @property
    def count(self) -> int:
        """Windows in an epoch."""
        return max(1, (len(self.tokens) - self.context) // self.context)

    def rows(self, first: int, count: int) -> np.ndarray:
        """Windows first … first + count − 1 of the endless order: (count, context + 1)."""
        rows = np.empty((count, self.context + 1), dtype=np.int64)
        for i in range(count):
            epoch, place = divmod(first + i, self.count)
            phase, order = _epoch(self.seed, epoch, self.count, len(self.tokens) - 1 - self.count * self.context)
            start = phase + int(order[place]) * self.context
            rows[i] = self.tokens[start : start + self.context + 1]
        return rows


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, windows: int, spare: int) -> tuple[int, np.ndarray]:
    """Where the windows of an epoch begin, and the order they are read in."""
    dice = np.random.default_rng([seed, epoch])
    return int(dice.integers(spare + 1)), dice.permutation(windows)


def in_order(tokens: np.ndarray, context: int, most: int | None = None) -> Iterator[np.ndarray]:
    """Windows side by side, for evaluation, each token predicted once: (≤ context + 1,) each; at most so many tokens."""
    starts = range(0, max(0, len(tokens) - 1), context)
    wanted = max(1, len(starts) if most is None else most // context)
    step = max(1, -(-len(starts) // wanted))
    for start in starts[::step]:
        yield tokens[start : start + context + 1].astype(np.int64)


def causal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each token asks for the next: (B, T + 1) → inputs and targets (B, T)."""
    return rows[:, :-1], rows[:, 1:]


def masked(rows: Tensor, share: float, mask: int, vocab: int, seed: list[int], first: int = 0) -> tuple[Tensor, Tensor]:
    """Hide some tokens and ask for them (https://arxiv.org/abs/1810.04805): (B, T + 1) → inputs and targets (B, T).

    Of the chosen, 80 % become the mask, 10 % another token, 10 % stay. Each row hides equally many, so rows weigh the same,
    and draws by its own number, `first` and on, so that it matters not with which others it is read.
    """
    inputs = rows[:, :-1].clone()  # (B, T)
    B, T = inputs.shape
    hidden = max(1, round(share * T))
    places, fate, others = np.empty((B, hidden), np.int64), np.empty((B, hidden)), np.empty((B, hidden), np.int64)
    for row in range(B):
        dice = np.random.default_rng([*seed, first + row])
        places[row] = dice.permutation(T)[:hidden]
        fate[row], others[row] = dice.random(hidden), dice.integers(vocab, size=hidden)
    where, chance = torch.from_numpy(places), torch.from_numpy(fate)  # (B, hidden)
    asked = inputs.gather(1, where)
    targets = torch.full_like(inputs, IGNORE).scatter(1, where, asked)
    new = torch.where(chance < 0.8, mask, torch.where(chance < 0.9, torch.from_numpy(others), asked))
    return inputs.scatter(1, where, new), targets
