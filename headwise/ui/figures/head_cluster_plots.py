"""Similarity of heads: a two-dimensional embedding and a dendrogram."""

from typing import TYPE_CHECKING

import numpy as np
from scipy.cluster.hierarchy import dendrogram, linkage
from scipy.spatial.distance import pdist, squareform

from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.similarity.compare_heads import HeadSimilarityResult
from headwise.ui.figures.figure_with_data import MUTED_COLOR, TEXT_COLOR, FigureWithData, make_figure, style_axes
from headwise.ui.role_badges import role_badge

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LEAVES = 64  # leaves of the dendrogram; with more heads, a leaf is a cluster


def draw_embedding(comparison: HeadSimilarityResult, profile: Profile | None = None) -> FigureWithData:
    """Plot heads so that similar attention is close. With a profile, they are colored by role."""
    points = comparison.head_coordinates()  # (H, 2)
    roles, colors = _roles_and_colors(comparison, profile)
    figure = make_figure(6.4, 5.6)
    axes = figure.subplots()
    axes.scatter(*points.T, s=22, c=colors, linewidths=0.4, edgecolors="#ffffff")
    correlation = np.corrcoef(pdist(points), squareform(np.sqrt(comparison["js"]), checks=False))[0, 1]
    subtitle = f"{len(points)} heads on {comparison.rows} rows of {comparison.texts} texts"
    title = f"{subtitle}; correlation of plotted and true distances: {correlation:.2f}"
    axes.set_title(title, fontsize=8, color=TEXT_COLOR, loc="left")
    style_axes(axes, "distance: √(Jensen–Shannon divergence) of attention", "")
    axes.set_aspect("equal", adjustable="datalim")
    order = np.argsort([role == "unclear" for role in roles], kind="stable")  # heads with a role are labeled first
    _label_points(axes, points[order], [_head_label(str(comparison.addresses[i]), roles[i]) for i in order])
    _legend(axes, roles)
    rows = [
        {"head": str(address), "role": role, "x": float(x), "y": float(y)}
        for address, role, (x, y) in zip(comparison.addresses, roles, points, strict=True)
    ]
    return FigureWithData(figure, rows)


def draw_clusters(comparison: HeadSimilarityResult, profile: Profile | None = None) -> FigureWithData:
    """Plot the average-linkage dendrogram of heads. Heads that join at the left have similar attention.

    The dashed line is the baseline: the distance of a head to itself on other text. With many heads, a leaf is a cluster.
    """
    roles, colors = _roles_and_colors(comparison, profile)
    tree = linkage(squareform(np.sqrt(comparison["js"]), checks=False), "average")
    count = min(len(comparison.addresses), MAX_LEAVES)
    layout = dendrogram(tree, p=count, truncate_mode="lastp", no_plot=True)
    figure = make_figure(6.8, 0.16 * count + 1.0)
    axes = figure.subplots()
    for xs, ys in zip(layout["dcoord"], layout["icoord"], strict=True):
        axes.plot(xs, ys, color=MUTED_COLOR, linewidth=0.9)
    self_distance = float(np.sqrt(np.median(comparison.baselines["js"])))
    if np.isfinite(self_distance):
        axes.axvline(self_distance, color="#b5402f", linewidth=0.8, linestyle="--")
    axes.set_yticks([10 * i + 5 for i in range(count)], [""] * count)
    axes.set_xlim(left=0)
    rows = []
    for row, leaf in enumerate(layout["leaves"]):
        members = _members(tree, leaf, len(comparison.addresses))
        rows += [{"head": str(comparison.addresses[i]), "role": roles[i], "leaf": row} for i in members]
        names = ", ".join(str(comparison.addresses[i]) for i in members[:4]) + (
            f" +{len(members) - 4}" if members[4:] else ""
        )
        role_label = roles[members[0]] if len(members) == 1 and roles[members[0]] != "unclear" else ""
        axes.text(-0.01, 10 * row + 5, f"{role_label}  {names}".strip(), transform=axes.get_yaxis_transform(), ha="right",
                   va="center", fontsize=7, color=colors[members[0]] if role_label else TEXT_COLOR)  # fmt: skip
    axes.set_ylim(10 * count, 0)
    style_axes(axes, "√(Jensen–Shannon divergence) at which heads join; dashed: a head and itself on other text")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return FigureWithData(figure, rows)


def _roles_and_colors(comparison: HeadSimilarityResult, profile: Profile | None) -> tuple[list[str], list[str]]:
    """Return role and color of every head; gray without a role or profile."""
    role_of = {} if profile is None else {head.address: head.role for head in profile}
    roles = [role_of.get(address, "unclear") for address in comparison.addresses]
    return roles, ["#c3c8ce" if role == "unclear" else role_badge(role)[1] for role in roles]


def _head_label(head: str, role: str) -> str:
    return head if role == "unclear" else f"{head} {role_badge(role)[0]}"


def _label_points(axes: "Axes", points: np.ndarray, names: list[str]) -> None:
    """Label as many dots as possible without overlaps."""
    figure = axes.get_figure()
    assert figure is not None
    figure.canvas.draw()  # computes the positions
    labeled: list[tuple[float, float]] = []
    dots = axes.transData.transform(points)
    for point, (x, y), name in zip(points, dots, names, strict=True):
        covered = (dots[:, 0] > x + 2) & (dots[:, 0] < x + 40) & (abs(dots[:, 1] - y - 4) < 9)
        if not covered.any() and all(abs(x - a) > 40 or abs(y - b) > 11 for a, b in labeled):
            labeled.append((x, y))
            axes.annotate(name, point, xytext=(4, 2), textcoords="offset points", fontsize=6, color=TEXT_COLOR)


def _legend(axes: "Axes", roles: list[str]) -> None:
    from matplotlib.lines import Line2D

    present_roles = sorted(set(roles) - {"unclear"})
    dots = [
        Line2D(
            [],
            [],
            marker="o",
            linestyle="",
            color=role_badge(role)[1],
            markersize=4,
            label=f"{role_badge(role)[0]}  {role}",
        )
        for role in present_roles
    ]
    if dots:
        axes.legend(
            handles=dots, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), labelcolor=TEXT_COLOR
        )


def _members(tree: np.ndarray, node: int, heads: int) -> list[int]:
    """Return the heads of a node of the dendrogram."""
    if node < heads:
        return [node]
    left, right = tree[node - heads, :2].astype(int)
    return sorted(_members(tree, left, heads) + _members(tree, right, heads))
