"""Time two models in alternation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headwise.analysis.recording.batching import forward_ids
from headwise.model import ModelProtocol, eval_mode


@dataclass(frozen=True)
class PairedTiming:
    """Seconds of two models, from the repeat with the median ratio, so that seconds and ratio agree.

    Attributes:
        before: Seconds of the first model.
        after: Seconds of the second model.
        low: Lower quartile of after / before over the repeats. NaN for a single repeat.
        high: Upper quartile of after / before.
        repeats: Number of repeats.

    >>> PairedTiming.median_of([(2.0, 1.0), (8.0, 2.0), (1.0, 3.0)])  # ratios 0.5, 0.25 and 3
    PairedTiming(before=2.0, after=1.0, low=0.375, high=1.75, repeats=3)
    """

    before: float
    after: float
    low: float
    high: float
    repeats: int

    @staticmethod
    def median_of(timings: Sequence[tuple[float, float]]) -> "PairedTiming":
        """Return the repeat with the median ratio. `timings` are an odd number of (before, after) pairs."""
        median = sorted(timings, key=lambda pair: pair[1] / pair[0])[len(timings) // 2]
        ratios = [after / before for before, after in timings]
        low, high = np.quantile(ratios, [0.25, 0.75]).tolist() if len(timings) > 1 else (float("nan"), float("nan"))
        return PairedTiming(*median, low, high, len(timings))

    @property
    def ratio(self) -> float:
        """Seconds after divided by seconds before."""
        return self.after / self.before

    @property
    def is_clearly_different(self) -> bool:
        """Whether 1 is outside the quartiles."""
        return self.high < 1 or self.low > 1

    def __str__(self) -> str:
        if self.repeats == 1:
            return "one repeat"
        return f"{self.low:.3f}–{self.high:.3f}{'' if self.is_clearly_different else ', no difference seen'}"


@torch.no_grad()
def interleaved_timing(models: tuple[ModelProtocol, ModelProtocol], length: int, repeats: int) -> PairedTiming:
    """Time forward passes of two models over a random text in alternation. An even number of repeats is raised by one.

    The order of the two models alternates, so that CPU caches and clock speed favor neither.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(models[0].spec.vocab, (1, length), generator=generator, device="cpu").to(
        models[0].device
    )  # (1, T)
    timings = []
    with eval_mode(models[0]), eval_mode(models[1]):
        for model in models:
            forward_ids(model, ids, hidden=False)  # warm up
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
