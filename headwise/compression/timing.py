"""How long two models take, one after the other, turn by turn."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headwise.analysis.recording.batching import read
from headwise.model import AnyModel, quiet


@dataclass(frozen=True)
class Timing:
    """Seconds before and after, of the turn with the median share: so the two and their share agree, and all were measured.

    >>> Timing.of([(2.0, 1.0), (8.0, 2.0), (1.0, 3.0)])  # shares of .5, .25 and 3
    Timing(before=2.0, after=1.0, low=0.375, high=1.75, turns=3)
    """

    before: float
    after: float
    low: float  # the quartiles of after / before over the turns; of a single turn NaN
    high: float
    turns: int

    @staticmethod
    def of(turns: Sequence[tuple[float, float]]) -> "Timing":
        """Of an odd number of turns, (before, after) each."""
        middle = sorted(turns, key=lambda pair: pair[1] / pair[0])[len(turns) // 2]
        shares = [after / before for before, after in turns]
        low, high = np.quantile(shares, [0.25, 0.75]).tolist() if len(turns) > 1 else (float("nan"), float("nan"))
        return Timing(*middle, low, high, len(turns))

    @property
    def share(self) -> float:
        """After as a share of before."""
        return self.after / self.before

    @property
    def differs(self) -> bool:
        """Whether 1 lies outside the quartiles."""
        return self.high < 1 or self.low > 1

    def __str__(self) -> str:
        if self.turns == 1:
            return "one turn"
        return f"{self.low:.3f}–{self.high:.3f}{'' if self.differs else ', no difference seen'}"


@torch.no_grad()
def take_turns(models: tuple[AnyModel, AnyModel], length: int, turns: int) -> Timing:
    """A pass of both models over a random text of so many tokens, turn by turn; of an even number one turn more.

    Who goes first changes each turn: what the one leaves in the caches and in the clock of the machine, the other finds.
    """
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(models[0].spec.vocab, (1, length), generator=draws).to(models[0].device)  # (1, T)
    made = []
    with quiet(models[0]), quiet(models[1]):
        for model in models:
            read(model, ids, hidden=False)  # the first call also warms up
        for turn in range(turns | 1):
            first, second = (_seconds(model, ids) for model in (models if turn % 2 == 0 else models[::-1]))
            made.append((first, second) if turn % 2 == 0 else (second, first))
    return Timing.of(made)


def _seconds(model: AnyModel, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    read(model, ids, hidden=False)
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
