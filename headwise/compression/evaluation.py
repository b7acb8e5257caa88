"""What a change costs: the same texts asked of the full model and of smaller ones, text by text, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from headwise.analysis.ablation.eval_targets import TargetBatch, ask, askable_units, check_askable
from headwise.analysis.ablation.head_outputs import read_on
from headwise.analysis.metrics.statistics import bootstrap, bootstrap_difference
from headwise.analysis.recording.batching import make_batches
from headwise.errors import HeadwiseError
from headwise.model import AnyModel, quiet

TOKENS = 2048  # run at once


def finite(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `asdict`: what is not known, NaN, is None, as JSON has it."""
    return {name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in items}


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class PairedEvaluation:
    """Texts to ask models for, and the full model's answers.

    A decoder is asked for every next token, an encoder for hidden ones, an encoder-decoder for the text of a pair; without
    an output, the loss of a text is how far its mean state has turned from the full model's, 1 − cosine.
    """

    batches: tuple[TargetBatch, ...]
    clean: tuple[Tensor, ...]  # for each batch the full model's answers
    counts: np.ndarray  # (texts,): how many answers each gives

    @staticmethod
    def of(model: AnyModel, on: Any, longest: int | None = None, *, past: int = 0) -> "PairedEvaluation":
        """Read texts and ask the full model; plain text is cut into units of `longest` tokens, as `importance` does.

        With `past`, next tokens are asked for only behind the first so many of each text.
        """
        check_askable(model, "loss")
        units = askable_units(model, read_on(model, on, longest))
        batches = tuple(ask(model, batch).past(past) for batch in make_batches(units, TOKENS, device=model.device))
        if not sum(float(asked.counts.sum()) for asked in batches):
            raise HeadwiseError(
                f"no text is longer than {past + 1} tokens, so there is nothing to judge by; give longer ones."
            )
        return PairedEvaluation.of_batches(model, batches)

    @staticmethod
    def of_batches(model: AnyModel, batches: tuple[TargetBatch, ...]) -> "PairedEvaluation":
        """Evaluate the full model on batches with their targets."""
        counts = torch.cat([batch.counts for batch in batches]).numpy()
        return PairedEvaluation(batches, tuple(_answers(model, batch) for batch in batches), counts)

    @property
    def metric(self) -> str:
        """What is measured."""
        return "1 − cosine" if self.batches[0].targets is None else "nats a token"

    @property
    def full(self) -> np.ndarray:
        """The full model's summed loss on each text, (texts,)."""
        return self._losses(self.clean)

    def losses(self, model: AnyModel) -> np.ndarray:
        """A smaller model's summed loss on each text, (texts,)."""
        return self._losses([_answers(model, asked) for asked in self.batches])

    def estimate(self, losses: np.ndarray) -> Estimate:
        """The mean loss."""
        return _estimate(losses.sum() / self.counts.sum(), bootstrap(losses, self.counts))

    def difference(self, losses: np.ndarray, others: np.ndarray) -> Estimate:
        """How much more is lost than by others, on the same texts."""
        mean = (losses - others).sum() / self.counts.sum()
        return _estimate(mean, bootstrap_difference(losses, self.counts, others, self.counts))

    def difference_from_draws(self, losses: np.ndarray, others: Sequence[np.ndarray], level: float = 0.95) -> Estimate:
        """How much more is lost than by others that were drawn by chance, on average over all that could be drawn.

        Other texts would have given another mean, and so would other draws. Each has Student's interval, by its own degrees
        of freedom, for three draws know little of their own spread; the squares of the two half-widths are added. That is
        exact where one of the two rules, and rather too wide between. Of one draw, or one text, there is none: NaN.
        """
        counts, each = self.counts[self.counts > 0], np.stack(others)[:, self.counts > 0]  # (n,), (S, n)
        gaps, total = losses[self.counts > 0] - each, counts.sum()
        S, n = gaps.shape
        means = gaps.sum(1) / total  # (S,)
        mean = float(means.mean())
        if min(S, n) < 2:
            return Estimate(mean, float("nan"), float("nan"))
        over_texts = n / (n - 1) * ((gaps.mean(0) - mean * counts) ** 2).sum() / total**2
        over_draws = means.var(ddof=1) / S
        reach = float(np.hypot(*(stdtrit([n - 1, S - 1], (1 + level) / 2) * np.sqrt([over_texts, over_draws]))))
        return Estimate(mean, mean - reach, mean + reach)

    def _losses(self, answers: Sequence[Tensor]) -> np.ndarray:
        pairs = zip(self.batches, answers, self.clean, strict=True)
        made = [a.lost(got, want).clamp(min=0) if a.targets is None else got for a, got, want in pairs]
        return torch.cat(made).double().cpu().numpy()


@torch.no_grad()
def _answers(model: AnyModel, batch: TargetBatch) -> Tensor:
    """Summed surprise of each text, (B,), or its mean state, (B, D)."""
    with quiet(model):
        return batch.answers(model, batch.pick(batch.run(model)))


def _estimate(mean: float, interval: tuple[np.ndarray, np.ndarray]) -> Estimate:
    return Estimate(float(mean), float(interval[0]), float(interval[1]))
