"""Loss against the fraction of remaining heads, for several ranking methods and random pruning."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headwise.analysis.ablation.recorded_head_outputs import MeanActivations, eval_corpus, mean_activations
from headwise.compression.paired_evaluation import LossEstimate, PairedEvaluator, nan_to_none
from headwise.compression.rankers import RANKERS, Scores, get_ranker
from headwise.compression.select_heads import compute_folded_biases, head_count_for_fraction, lowest_scoring, rank_heads
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol
from headwise.progress import ProgressOption, callback_of, shows_progress

KEEP_FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class CurvePoint:
    """Loss after pruning to one fraction by one ranking method.

    Attributes:
        ranking: Ranking method.
        kept_fraction: Fraction of the heads that remain. It may differ from the requested one by rounding to full heads.
        heads: Number of heads that remain.
        loss: Loss with its interval over texts. Random ranking: mean, minimum and maximum over seeds.
        loss_increase: Loss minus the loss of the full model, paired by text. Random ranking: mean, minimum and maximum.
    """

    ranking: str
    kept_fraction: float
    heads: int
    loss: LossEstimate
    loss_increase: LossEstimate


@dataclass(frozen=True)
class PruningCurves:
    """Losses for all ranking methods and fractions.

    Attributes:
        metric: Unit of the losses.
        texts: Number of texts.
        seeds: Number of random rankings.
        full_loss: Loss of the full model.
        points: Points of all ranking methods.
    """

    metric: str
    texts: int
    seeds: int
    full_loss: LossEstimate
    points: tuple[CurvePoint, ...]

    def __repr__(self) -> str:
        from headwise.ui.result_text import pruning_curve_table

        return pruning_curve_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import pruning_curve_table

        return pruning_curve_table(self).as_html()

    def points_by_ranking(self, ranking: str) -> list[CurvePoint]:
        """Return the points of one ranking method, the largest model first."""
        return [point for point in self.points if point.ranking == ranking]

    def rows(self) -> list[list[str | int | float]]:
        """Return rows of ranking, fraction, heads, loss, and loss increase with its low and high ends."""
        return [
            [p.ranking, p.kept_fraction, p.heads, p.loss.mean, *asdict(p.loss_increase).values()] for p in self.points
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the curve as plain data. NaN becomes None."""
        return asdict(self, dict_factory=nan_to_none)


@shows_progress
def pruning_curve(
    model: ModelProtocol,
    corpus: Any,
    test: Any = None,
    *,
    keep_fractions: Sequence[float] = KEEP_FRACTIONS,
    rankings: Sequence[str] | None = None,
    fold_mean: bool = True,
    means: MeanActivations | None = None,
    seeds: int = 3,
    gate_steps: int = 200,
    scores: Mapping[str, Scores] | None = None,
    progress: ProgressOption = None,
) -> PruningCurves:
    """Rank heads on some texts, prune the model to several fractions, and measure the loss on other texts.

    Args:
        model: The model. It is not changed.
        corpus: Texts on which heads are ranked and means are taken.
        test: Texts for the evaluation. None: the texts of `corpus`.
        keep_fractions: Fractions of remaining heads. Each is rounded to a number of heads.
        rankings: Ranking methods. None: all default methods that suit the model.
        fold_mean: Fold the mean outputs of pruned heads into biases.
        means: Mean activations over `corpus`, if they were computed before.
        seeds: Number of random rankings.
        gate_steps: Training steps of learned gates. Gates are trained once, for the median of the fractions.
        scores: Scores by ranking method over `corpus`, if they were computed before.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        The loss of each pruned model.

    Raises:
        ArgumentError: If fractions, ranking methods or seeds are empty.
    """
    progress = callback_of(progress)
    rankings = default_rankings(model) if rankings is None else rankings
    if not keep_fractions or not rankings or seeds < 1:
        raise ArgumentError(
            "keep_fractions, rankings, seeds: at least one of each is needed. "
            f"Got {keep_fractions!r}, {rankings!r} and {seeds!r}. Use the defaults, or keep_fractions=(0.9, 0.5)."
        )
    total = len(model.spec.head_addresses)
    # Several fractions may round to the same number of heads.
    counts = sorted({head_count_for_fraction(total, keep) for keep in keep_fractions}, reverse=True)
    corpus = eval_corpus(model, corpus)
    if fold_mean and means is None:
        means = mean_activations(model, corpus)
    means = means if fold_mean else None
    scores_by_ranking = {ranking: [dict((scores or {}).get(ranking, {}))] for ranking in rankings}
    for ranking in rankings:
        if get_ranker(ranking).is_random:
            scores_by_ranking[ranking] = [rank_heads(model, None, ranking, seed=seed) for seed in range(seeds)]
        elif not scores_by_ranking[ranking][0]:
            middle = float(np.median(keep_fractions))
            scores_by_ranking[ranking] = [
                rank_heads(model, corpus, ranking, keep=middle, means=means, gate_steps=gate_steps, progress=progress)
            ]
    evaluation = PairedEvaluator.of(model, corpus if test is None else test)
    points, done, num_prunings = [], 0, len(counts) * sum(map(len, scores_by_ranking.values()))
    for ranking, score_sets in scores_by_ranking.items():
        for kept_heads in counts:
            losses = []
            for head_scores in score_sets:
                pruned = lowest_scoring(model.spec.head_addresses, head_scores, total - kept_heads)
                losses.append(
                    evaluation.losses_per_text(model.prune(pruned, compute_folded_biases(model, pruned, means)))
                )
                done += 1
                if progress is not None:
                    progress("pruned models", done, num_prunings)
            points.append(_curve_point(evaluation, ranking, kept_heads / total, kept_heads, losses))
    return PruningCurves(
        evaluation.metric,
        len(evaluation.counts),
        seeds,
        evaluation.mean_loss(evaluation.full_losses_per_text),
        tuple(points),
    )


def default_rankings(model: ModelProtocol) -> tuple[str, ...]:
    """Return the default ranking methods. Gradients need a language modeling head."""
    return tuple(
        ranking
        for ranking, ranker in RANKERS.items()
        if ranker.is_default and (model.output is not None or not ranker.needs_lm_head)
    )


def _curve_point(
    evaluation: PairedEvaluator, ranking: str, kept_fraction: float, kept_heads: int, losses: list[np.ndarray]
) -> CurvePoint:
    if not get_ranker(ranking).is_random:
        return CurvePoint(
            ranking,
            kept_fraction,
            kept_heads,
            evaluation.mean_loss(losses[0]),
            evaluation.difference(losses[0], evaluation.full_losses_per_text),
        )
    means = [float(loss.sum() / evaluation.counts.sum()) for loss in losses]
    full = float(evaluation.full_losses_per_text.sum() / evaluation.counts.sum())
    loss = LossEstimate(float(np.mean(means)), min(means), max(means))
    return CurvePoint(
        ranking, kept_fraction, kept_heads, loss, LossEstimate(loss.mean - full, loss.low - full, loss.high - full)
    )
