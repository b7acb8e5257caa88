"""`profile.plot`: every picture of a model's heads, by name."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwise.analysis.roles.history import HeadHistory
from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.similarity.compare_heads import Comparison
from headwise.compression.curve import Curve
from headwise.heads.head import Pattern
from headwise.spec import AttentionSpec, ModelSpec
from headwise.ui.figures.compare import draw_clusters, draw_map
from headwise.ui.figures.depth import USUAL, draw_depth
from headwise.ui.figures.diagram import draw_diagram
from headwise.ui.figures.figure_io import Drawing
from headwise.ui.figures.offsets import draw_offsets
from headwise.ui.figures.roles import draw_roles
from headwise.ui.figures.tradeoff import draw_pruning, draw_tradeoff
from headwise.ui.figures.training_history import draw_lives


class Plot:
    """Each method gives a `Drawing`: shown in a notebook, written by `.save("a.svg")`, its numbers in `.rows`."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def roles(self) -> Drawing:
        """The grid of heads with their roles."""
        return draw_roles(self.profile)

    def offsets(self, heads: Pattern | None = None) -> Drawing:
        """How much heads attend so many tokens back, or ahead."""
        return draw_offsets(self.profile, heads)

    def depth(self, measures: Sequence[str] = USUAL) -> Drawing:
        """Measures from the first layer to the last."""
        return draw_depth(self.profile, measures)

    def map(self, compared: Comparison) -> Drawing:
        """Heads on paper, as far from each other as they are in where they look; `compared` is made by hw.compare."""
        return draw_map(compared, self.profile)

    def clusters(self, compared: Comparison) -> Drawing:
        """The tree of heads that look at the same."""
        return draw_clusters(compared, self.profile)

    def lives(self, history: HeadHistory, measure: str = "induction") -> Drawing:
        """A measure of every head over training."""
        return draw_lives(history, measure)

    def pruning(self, curve: Curve) -> Drawing:
        """Loss against the share of heads kept."""
        return draw_pruning(curve)

    def tradeoff(self, rows: Iterable[Mapping[str, Any]], x: str = "", y: str = "loss", title: str = "") -> Drawing:
        """Loss against anything, with bands."""
        return draw_tradeoff(rows, x, y, title)

    def diagram(self, spec: AttentionSpec | ModelSpec) -> Drawing:
        """How the heads of a layer stand beside each other: input, q k v, attention, concatenation, W_O."""
        return draw_diagram(spec)
