"""`profile.plot`: every picture of a model's heads, by name."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwise.analysis.roles.head_history import HeadHistory
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.similarity.compare_heads import HeadComparison
from headwise.compression.pruning_curve import PruningCurve
from headwise.heads.head import HeadPattern
from headwise.spec import AttentionSpec, ModelSpec
from headwise.ui.figures.depth_profile import DEFAULT_METRICS, draw_depth
from headwise.ui.figures.diagram import draw_attention_diagram
from headwise.ui.figures.figure_io import FigureWithData
from headwise.ui.figures.head_cluster_plots import draw_clusters, draw_embedding
from headwise.ui.figures.offset_profile import draw_offsets
from headwise.ui.figures.role_grid import draw_roles
from headwise.ui.figures.tradeoff_curves import draw_pruning, draw_tradeoff
from headwise.ui.figures.training_history import draw_history


class PlotAccessor:
    """Each method gives a `FigureWithData`: shown in a notebook, written by `.save("a.svg")`, its numbers in `.rows`."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def roles(self) -> FigureWithData:
        """The grid of heads with their roles."""
        return draw_roles(self.profile)

    def offsets(self, heads: HeadPattern | None = None) -> FigureWithData:
        """How much heads attend so many tokens back, or ahead."""
        return draw_offsets(self.profile, heads)

    def depth(self, metrics: Sequence[str] = DEFAULT_METRICS) -> FigureWithData:
        """Metrics from the first layer to the last."""
        return draw_depth(self.profile, metrics)

    def embedding(self, comparison: HeadComparison) -> FigureWithData:
        """Heads on paper, as far from each other as they are in where they look; `comparison` is made by hw.compare_heads."""
        return draw_embedding(comparison, self.profile)

    def clusters(self, comparison: HeadComparison) -> FigureWithData:
        """The tree of heads that look at the same."""
        return draw_clusters(comparison, self.profile)

    def history(self, history: HeadHistory, metric: str = "induction") -> FigureWithData:
        """A metric of every head over training."""
        return draw_history(history, metric)

    def pruning(self, curve: PruningCurve) -> FigureWithData:
        """Loss against the share of heads kept."""
        return draw_pruning(curve)

    def tradeoff(
        self, rows: Iterable[Mapping[str, Any]], xlabel: str = "", ylabel: str = "loss", title: str = ""
    ) -> FigureWithData:
        """Loss against anything, with bands."""
        return draw_tradeoff(rows, xlabel, ylabel, title)

    def diagram(self, spec: AttentionSpec | ModelSpec) -> FigureWithData:
        """How the heads of a layer stand beside each other: input, q k v, attention, concatenation, W_O."""
        return draw_attention_diagram(spec)
