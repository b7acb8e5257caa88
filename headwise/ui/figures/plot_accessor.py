"""`profile.plot`: figures of a profile."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwise.analysis.roles.head_history import HeadHistory
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.similarity.compare_heads import HeadSimilarityResult
from headwise.compression.pruning_curve import PruningCurves
from headwise.heads.head import HeadPattern
from headwise.spec import AttentionSpec, ModelSpec
from headwise.ui.figures.depth_profile import DEFAULT_METRICS, draw_depth
from headwise.ui.figures.diagram import draw_attention_diagram
from headwise.ui.figures.figure_with_data import FigureWithData
from headwise.ui.figures.head_cluster_plots import draw_clusters, draw_embedding
from headwise.ui.figures.head_history_plots import draw_history
from headwise.ui.figures.offset_profile import draw_offsets
from headwise.ui.figures.role_grid import draw_roles
from headwise.ui.figures.tradeoff_curves import draw_pruning, draw_tradeoff


class PlotAccessor:
    """Figures of a profile. Each method returns a `FigureWithData` with `.save("a.svg")` and its data in `.rows`."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def roles(self) -> FigureWithData:
        """Plot the grid of heads with their roles."""
        return draw_roles(self.profile)

    def offsets(self, heads: HeadPattern | None = None) -> FigureWithData:
        """Plot the mean attention of heads by distance."""
        return draw_offsets(self.profile, heads)

    def depth(self, metrics: Sequence[str] = DEFAULT_METRICS) -> FigureWithData:
        """Plot metrics from the first layer to the last."""
        return draw_depth(self.profile, metrics)

    def embedding(self, comparison: HeadSimilarityResult) -> FigureWithData:
        """Plot heads in two dimensions by the similarity of their attention, a result of `hw.compare_heads`."""
        return draw_embedding(comparison, self.profile)

    def clusters(self, comparison: HeadSimilarityResult) -> FigureWithData:
        """Plot the dendrogram of heads by the similarity of their attention."""
        return draw_clusters(comparison, self.profile)

    def history(self, history: HeadHistory, metric: str = "induction") -> FigureWithData:
        """Plot a metric of every head during training."""
        return draw_history(history, metric)

    def pruning(self, curve: PruningCurves) -> FigureWithData:
        """Plot the loss against the fraction of heads kept."""
        return draw_pruning(curve)

    def tradeoff(
        self, rows: Iterable[Mapping[str, Any]], xlabel: str = "", ylabel: str = "loss", title: str = ""
    ) -> FigureWithData:
        """Plot a trade-off curve with confidence bands."""
        return draw_tradeoff(rows, xlabel, ylabel, title)

    def diagram(self, spec: AttentionSpec | ModelSpec) -> FigureWithData:
        """Draw the diagram of a layer: input, q k v, attention, concatenation, W_O."""
        return draw_attention_diagram(spec)
