"""Loss against the share of heads kept: one ranking for each way to choose, cut at every share, beside random cuts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headwise.analysis.ablation.head_outputs import Means, mean_activations, read_on
from headwise.compression.evaluation import Estimate, PairedEvaluation, finite
from headwise.compression.prune_heads import cut, fold
from headwise.compression.rankers import WAYS, Scores, way_of
from headwise.compression.select_heads import heads_left, rank, worst
from headwise.errors import HeadwiseError
from headwise.model import AnyModel
from headwise.progress import Progress

KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class CurvePoint:
    """One cut. Intervals are over texts, `more` is paired with the full model's loss; of random cuts the mean over seeds is
    told, and in place of an interval the least and the most of them."""

    by: str
    kept: float  # the share of heads that is really left, not the one asked for: heads are whole
    heads: int
    loss: Estimate
    more: Estimate  # than the full model's


@dataclass(frozen=True)
class Curve:
    """Every cut by every way to choose."""

    metric: str
    texts: int
    seeds: int
    full: Estimate
    points: tuple[CurvePoint, ...]

    def of(self, by: str) -> list[CurvePoint]:
        """The cuts of one way to choose, the largest model first."""
        return [point for point in self.points if point.by == by]

    def rows(self) -> list[list[str | int | float]]:
        """By, share, heads, loss, and how much more than the full model's, with both ends."""
        return [[p.by, p.kept, p.heads, p.loss.mean, *asdict(p.more).values()] for p in self.points]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data; what is not known is None."""
        return asdict(self, dict_factory=finite)


def curve(
    model: AnyModel,
    on: Any,
    test: Any = None,
    *,
    keeps: Sequence[float] = KEEPS,
    bys: Sequence[str] | None = None,
    folded: bool = True,
    means: Means | None = None,
    seeds: int = 3,
    steps: int = 200,
    scores: Mapping[str, Scores] | None = None,
    progress: Progress | None = None,
) -> Curve:
    """Rank heads on some texts, cut the model at every share, and measure its loss on others, `test` (None: the same).

    A share is rounded to whole heads; points say the share that is really kept. `scores` and `means` are those
    over `on`, if they are there already.
    Gates are learned once, for the middle of the shares.
    """
    bys = usual_bys(model) if bys is None else bys
    if not keeps or not bys or seeds < 1:
        raise HeadwiseError(f"a curve needs shares, ways to choose and seeds; got {keeps!r}, {bys!r} and {seeds!r}.")
    total = len(model.spec.addresses)
    counts = sorted({heads_left(total, keep) for keep in keeps}, reverse=True)  # shares may come to the same cut
    on = read_on(model, on)
    if folded and means is None:
        means = mean_activations(model, on)
    means = means if folded else None
    rankings = {by: [dict((scores or {}).get(by, {}))] for by in bys}
    for by in bys:
        if way_of(by).drawn:
            rankings[by] = [rank(model, None, by, seed=seed) for seed in range(seeds)]
        elif not rankings[by][0]:
            middle = float(np.median(keeps))
            rankings[by] = [rank(model, on, by, keep=middle, means=means, steps=steps, progress=progress)]
    evaluation = PairedEvaluation.of(model, on if test is None else test)
    points, done, of = [], 0, len(counts) * sum(map(len, rankings.values()))
    for by, made in rankings.items():
        for left in counts:
            losses = []
            for ranking in made:
                gone = worst(model.spec.addresses, ranking, total - left)
                losses.append(evaluation.losses(cut(model, gone, None if means is None else fold(model, gone, means))))
                done += 1
                if progress is not None:
                    progress("measuring cuts", done, of)
            points.append(_point(evaluation, by, left / total, left, losses))
    return Curve(evaluation.metric, len(evaluation.counts), seeds, evaluation.estimate(evaluation.full), tuple(points))


def usual_bys(model: AnyModel) -> tuple[str, ...]:
    """The ways a curve shows unless others are asked for; without an output there is no slope."""
    return tuple(by for by, way in WAYS.items() if way.usual and (model.output is not None or not way.output))


def _point(evaluation: PairedEvaluation, by: str, kept: float, left: int, losses: list[np.ndarray]) -> CurvePoint:
    if not way_of(by).drawn:
        return CurvePoint(
            by, kept, left, evaluation.estimate(losses[0]), evaluation.difference(losses[0], evaluation.full)
        )
    means = [float(loss.sum() / evaluation.counts.sum()) for loss in losses]
    full = float(evaluation.full.sum() / evaluation.counts.sum())
    loss = Estimate(float(np.mean(means)), min(means), max(means))
    return CurvePoint(by, kept, left, loss, Estimate(loss.mean - full, loss.low - full, loss.high - full))
