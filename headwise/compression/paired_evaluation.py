"""Measure the loss of changed models against the full model on the same texts, with confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from headwise.analysis.ablation.eval_targets import TargetBatch, check_metric, evaluable_samples, make_target_batch
from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
from headwise.analysis.metrics.statistics import bootstrap_difference_interval, bootstrap_interval
from headwise.analysis.recording.batching import make_batches
from headwise.errors import ArgumentError
from headwise.kernels.rounding_tolerance import to_float64
from headwise.model import ModelProtocol, eval_mode

BATCH_TOKENS = 2048  # tokens per batch


def nan_to_none(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict for `asdict` in which NaN and infinity are None, for JSON."""
    return {name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in items}


@dataclass(frozen=True)
class LossEstimate:
    """A mean with its 95% confidence interval.

    Attributes:
        mean: Mean.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class PairedEvaluator:
    """Evaluation texts, and the scores of the full model on them.

    The loss of a decoder is that of each next token, of an encoder that of masked tokens, and of an encoder-decoder that of
    the target text. Without a language modeling head, the loss of a text is 1 − cosine between the mean hidden states of the
    changed and the full model.

    Attributes:
        batches: Batches of texts with their targets.
        full_answers: Score of the full model on each batch.
        counts: Number of targets of each text, (texts,).
    """

    batches: tuple[TargetBatch, ...]
    full_answers: tuple[Tensor, ...]
    counts: np.ndarray

    @staticmethod
    def of(
        model: ModelProtocol, corpus: Any, max_length: int | None = None, *, skip_tokens: int = 0
    ) -> "PairedEvaluator":
        """Tokenize texts and evaluate the full model.

        Args:
            model: The full model.
            corpus: A text, a list of texts, a path or a Corpus.
            max_length: Maximum number of tokens per text. Longer plain texts are split into chunks, as in `importance`.
            skip_tokens: Number of first tokens of each text that are not evaluated.

        Returns:
            An evaluator with the scores of the full model.
        """
        check_metric(model, "loss")
        samples = evaluable_samples(model, eval_corpus(model, corpus, max_length))
        batches = tuple(
            make_target_batch(model, batch).ignore_first_targets(skip_tokens)
            for batch in make_batches(samples, BATCH_TOKENS, device=model.device)
        )
        if not sum(float(target_batch.targets_per_text.sum()) for target_batch in batches):
            raise ArgumentError(
                f"corpus: no text is longer than {skip_tokens + 1} tokens, so no token can be evaluated. "
                "Give longer texts."
            )
        return PairedEvaluator.of_batches(model, batches)

    @staticmethod
    def of_batches(model: ModelProtocol, batches: tuple[TargetBatch, ...]) -> "PairedEvaluator":
        """Evaluate the full model on batches with their targets."""
        counts = torch.cat([batch.targets_per_text for batch in batches]).numpy()
        return PairedEvaluator(batches, tuple(_answers(model, batch) for batch in batches), counts)

    @property
    def metric(self) -> str:
        """Unit of the loss."""
        return "1 − cosine" if self.batches[0].targets is None else "nats per token"

    @property
    def full_losses_per_text(self) -> np.ndarray:
        """Summed loss of the full model on each text, (texts,)."""
        return self._losses(self.full_answers)

    def losses_per_text(self, model: ModelProtocol) -> np.ndarray:
        """Return the summed loss of a changed model on each text, (texts,)."""
        return self._losses([_answers(model, target_batch) for target_batch in self.batches])

    def mean_loss(self, losses: np.ndarray) -> LossEstimate:
        """Return the mean loss with its interval over texts."""
        return _estimate(losses.sum() / self.counts.sum(), bootstrap_interval(losses, self.counts))

    def difference(self, losses: np.ndarray, others: np.ndarray) -> LossEstimate:
        """Return the mean loss minus that of other losses on the same texts, paired by text."""
        mean = (losses - others).sum() / self.counts.sum()
        return _estimate(mean, bootstrap_difference_interval(losses, self.counts, others, self.counts))

    def difference_from_random(
        self, losses: np.ndarray, others: Sequence[np.ndarray], level: float = 0.95
    ) -> LossEstimate:
        """Return the mean loss minus the expected loss of random plans.

        The interval covers the choice of texts and the choice of random plans. Each has a Student t interval with its own
        degrees of freedom, because three random plans say little about their variance. The squares of the two half-widths
        are added. This is exact if one source dominates, and conservative otherwise. The interval is NaN for a single
        random plan or a single text.
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
        return to_float64(torch.cat(text_losses)).cpu().numpy()


@torch.no_grad()
def _answers(model: ModelProtocol, batch: TargetBatch) -> Tensor:
    """Return the summed loss of each text, (B,), or its mean hidden state, (B, D)."""
    with eval_mode(model):
        return batch.score_hidden_states(model, batch.select_target_rows(batch.final_hidden_states(model)))


def _estimate(mean: float, interval: tuple[np.ndarray, np.ndarray]) -> LossEstimate:
    return LossEstimate(float(mean), float(interval[0]), float(interval[1]))
