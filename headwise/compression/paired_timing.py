"""How long two models take, one after the other, turn by turn."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headwise.analysis.recording.batching import forward_ids
from headwise.model import ModelProtocol, eval_mode


@dataclass(frozen=True)
class PairedTiming:
    """Seconds before and after, of the turn with the median share: so the two and their share agree, and all were measured.

    >>> PairedTiming.median_of([(2.0, 1.0), (8.0, 2.0), (1.0, 3.0)])  # shares of .5, .25 and 3
    PairedTiming(before=2.0, after=1.0, low=0.375, high=1.75, repeats=3)
    """

    before: float
    after: float
    low: float  # the quartiles of after / before over the turns; of a single turn NaN
    high: float
    repeats: int

    @staticmethod
    def median_of(timings: Sequence[tuple[float, float]]) -> "PairedTiming":
        """Of an odd number of turns, (before, after) each."""
        median = sorted(timings, key=lambda pair: pair[1] / pair[0])[len(timings) // 2]
        ratios = [after / before for before, after in timings]
        low, high = np.quantile(ratios, [0.25, 0.75]).tolist() if len(timings) > 1 else (float("nan"), float("nan"))
        return PairedTiming(*median, low, high, len(timings))

    @property
    def ratio(self) -> float:
        """After as a share of before."""
        return self.after / self.before

    @property
    def is_clearly_different(self) -> bool:
        """Whether 1 lies outside the quartiles."""
        return self.high < 1 or self.low > 1

    def __str__(self) -> str:
        if self.repeats == 1:
            return "one turn"
        return f"{self.low:.3f}–{self.high:.3f}{'' if self.is_clearly_different else ', no difference seen'}"


@torch.no_grad()
def interleaved_timing(models: tuple[ModelProtocol, ModelProtocol], length: int, repeats: int) -> PairedTiming:
    """A pass of both models over a random text of so many tokens, turn by turn; of an even number one turn more.

    Who goes first changes each turn: what the one leaves in the caches and in the clock of the machine, the other finds.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(models[0].spec.vocab, (1, length), generator=generator).to(models[0].device)  # (1, T)
    timings = []
    with eval_mode(models[0]), eval_mode(models[1]):
        for model in models:
            forward_ids(model, ids, hidden=False)  # the first call also warms up
        for repeat in range(repeats | 1):
            first, second = (_seconds(model, ids) for model in (models if repeat % 2 == 0 else models[::-1]))
            timings.append((first, second) if repeat % 2 == 0 else (second, first))
    return PairedTiming.median_of(timings)


def _seconds(model: ModelProtocol, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    forward_ids(model, ids, hidden=False)
    if ids.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
