"""Loss against the share of heads kept: one ranking for each way to choose, cut at every share, beside random cuts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headwise.analysis.ablation.head_outputs import MeanActivations, eval_corpus, mean_activations
from headwise.compression.paired_evaluation import LossEstimate, PairedEvaluator, nan_to_none
from headwise.compression.rankers import RANKERS, Scores, get_ranker
from headwise.compression.select_heads import compute_folded_biases, kept_head_count, lowest_scoring, rank_heads
from headwise.errors import HeadwiseError
from headwise.model import ModelProtocol
from headwise.progress import Progress

KEEP_FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class CurvePoint:
    """One cut. Intervals are over texts, `loss_increase` is paired with the full model's loss; of random cuts the mean over
    seeds is told, and in place of an interval the least and the most of them."""

    ranking: str
    kept_fraction: float  # the share of heads that is really left, not the one asked for: heads are whole
    heads: int
    loss: LossEstimate
    loss_increase: LossEstimate  # than the full model's


@dataclass(frozen=True)
class PruningCurve:
    """Every cut by every way to choose."""

    metric: str
    texts: int
    seeds: int
    full_loss: LossEstimate
    points: tuple[CurvePoint, ...]

    def points_by_ranking(self, ranking: str) -> list[CurvePoint]:
        """The cuts of one way to choose, the largest model first."""
        return [point for point in self.points if point.ranking == ranking]

    def rows(self) -> list[list[str | int | float]]:
        """Ranking, share, heads, loss, and how much more than the full model's, with both ends."""
        return [
            [p.ranking, p.kept_fraction, p.heads, p.loss.mean, *asdict(p.loss_increase).values()] for p in self.points
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data; what is not known is None."""
        return asdict(self, dict_factory=nan_to_none)


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
    progress: Progress | None = None,
) -> PruningCurve:
    """Rank heads on some texts, cut the model at every share, and measure its loss on others, `test` (None: the same).

    A share is rounded to whole heads; points say the share that is really kept. `scores` and `means` are those
    over `corpus`, if they are there already.
    Gates are learned once, for the middle of the shares.
    """
    rankings = default_rankings(model) if rankings is None else rankings
    if not keep_fractions or not rankings or seeds < 1:
        raise HeadwiseError(
            f"a curve needs shares, ways to choose and seeds; got {keep_fractions!r}, {rankings!r} and {seeds!r}."
        )
    total = len(model.spec.head_addresses)
    # Shares may come to the same cut.
    counts = sorted({kept_head_count(total, keep) for keep in keep_fractions}, reverse=True)
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
                    progress("measuring cuts", done, num_prunings)
            points.append(_curve_point(evaluation, ranking, kept_heads / total, kept_heads, losses))
    return PruningCurve(
        evaluation.metric,
        len(evaluation.counts),
        seeds,
        evaluation.mean_loss(evaluation.full_losses_per_text),
        tuple(points),
    )


def default_rankings(model: ModelProtocol) -> tuple[str, ...]:
    """The ways a curve shows unless others are asked for; without an output there is no slope."""
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
