"""What a change costs: the same texts asked of the full model and of smaller ones, text by text, with intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from headwise.analysis.ablation.eval_targets import TargetBatch, check_metric, evaluable_samples, make_target_batch
from headwise.analysis.ablation.head_outputs import eval_corpus
from headwise.analysis.metrics.statistics import bootstrap_difference_interval, bootstrap_interval
from headwise.analysis.recording.batching import make_batches
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol, eval_mode

BATCH_TOKENS = 2048  # run at once


def nan_to_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `asdict`: what is not known, NaN, is None, as JSON has it."""
    return {name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in items}


@dataclass(frozen=True)
class LossEstimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class PairedEvaluator:
    """Texts to ask models for, and the full model's answers.

    A decoder is asked for every next token, an encoder for hidden ones, an encoder-decoder for the text of a pair; without
    an output, the loss of a text is how far its mean state has turned from the full model's, 1 − cosine.
    """

    batches: tuple[TargetBatch, ...]
    full_answers: tuple[Tensor, ...]  # for each batch the full model's answers
    counts: np.ndarray  # (texts,): how many answers each gives

    @staticmethod
    def of(
        model: ModelProtocol, corpus: Any, max_length: int | None = None, *, skip_tokens: int = 0
    ) -> "PairedEvaluator":
        """Read texts and ask the full model; plain text is cut into units of `max_length` tokens, as `importance` does.

        With `skip_tokens`, next tokens are asked for only behind the first so many of each text.
        """
        check_metric(model, "loss")
        samples = evaluable_samples(model, eval_corpus(model, corpus, max_length))
        batches = tuple(
            make_target_batch(model, batch).ignore_first_targets(skip_tokens)
            for batch in make_batches(samples, BATCH_TOKENS, device=model.device)
        )
        if not sum(float(target_batch.targets_per_text.sum()) for target_batch in batches):
            raise HeadwiseError(
                f"no text is longer than {skip_tokens + 1} tokens, so there is nothing to judge by; give longer ones."
            )
        return PairedEvaluator.of_batches(model, batches)

    @staticmethod
    def of_batches(model: ModelProtocol, batches: tuple[TargetBatch, ...]) -> "PairedEvaluator":
        """Evaluate the full model on batches with their targets."""
        counts = torch.cat([batch.targets_per_text for batch in batches]).numpy()
        return PairedEvaluator(batches, tuple(_answers(model, batch) for batch in batches), counts)

    @property
    def metric(self) -> str:
        """What is measured."""
        return "1 − cosine" if self.batches[0].targets is None else "nats a token"

    @property
    def full_losses_per_text(self) -> np.ndarray:
        """The full model's summed loss on each text, (texts,)."""
        return self._losses(self.full_answers)

    def losses_per_text(self, model: ModelProtocol) -> np.ndarray:
        """A smaller model's summed loss on each text, (texts,)."""
        return self._losses([_answers(model, target_batch) for target_batch in self.batches])

    def mean_loss(self, losses: np.ndarray) -> LossEstimate:
        """The mean loss."""
        return _estimate(losses.sum() / self.counts.sum(), bootstrap_interval(losses, self.counts))

    def difference(self, losses: np.ndarray, others: np.ndarray) -> LossEstimate:
        """How much more is lost than by others, on the same texts."""
        mean = (losses - others).sum() / self.counts.sum()
        return _estimate(mean, bootstrap_difference_interval(losses, self.counts, others, self.counts))

    def difference_from_random(
        self, losses: np.ndarray, others: Sequence[np.ndarray], level: float = 0.95
    ) -> LossEstimate:
        """How much more is lost than by others that were drawn by chance, on average over all that could be drawn.

        Other texts would have given another mean, and so would other draws. Each has Student's interval, by its own degrees
        of freedom, for three draws know little of their own spread; the squares of the two half-widths are added. That is
        exact where one of the two rules, and rather too wide between. Of one draw, or one text, there is none: NaN.
        """
        counts, random_losses = self.counts[self.counts > 0], np.stack(others)[:, self.counts > 0]  # (n,), (S, n)
        gaps, total = losses[self.counts > 0] - random_losses, counts.sum()
        S, n = gaps.shape
        means = gaps.sum(1) / total  # (S,)
        mean = float(means.mean())
        if min(S, n) < 2:
            return LossEstimate(mean, float("nan"), float("nan"))
        over_texts = n / (n - 1) * ((gaps.mean(0) - mean * counts) ** 2).sum() / total**2
        over_draws = means.var(ddof=1) / S
        half_width = float(np.hypot(*(stdtrit([n - 1, S - 1], (1 + level) / 2) * np.sqrt([over_texts, over_draws]))))
        return LossEstimate(mean, mean - half_width, mean + half_width)

    def _losses(self, answers: Sequence[Tensor]) -> np.ndarray:
        pairs = zip(self.batches, answers, self.full_answers, strict=True)
        text_losses = [
            batch.loss_increase(answer, full_answer).clamp(min=0) if batch.targets is None else answer
            for batch, answer, full_answer in pairs
        ]
        return torch.cat(text_losses).double().cpu().numpy()


@torch.no_grad()
def _answers(model: ModelProtocol, batch: TargetBatch) -> Tensor:
    """Summed surprise of each text, (B,), or its mean state, (B, D)."""
    with eval_mode(model):
        return batch.score_hidden_states(model, batch.select_target_rows(batch.final_hidden_states(model)))


def _estimate(mean: float, interval: tuple[np.ndarray, np.ndarray]) -> LossEstimate:
    return LossEstimate(float(mean), float(interval[0]), float(interval[1]))
