"""Heads beside each other: a map whose distances are those between heads, and the tree of their clusters."""

from typing import TYPE_CHECKING

import numpy as np
from scipy.cluster.hierarchy import dendrogram, linkage
from scipy.spatial.distance import pdist, squareform

from headwise.analysis.roles.profile_result import Profile
from headwise.analysis.similarity.compare_heads import Comparison
from headwise.ui.figures.figure_io import FAINT, INK, Drawing, make_figure, tidy
from headwise.ui.role_badges import sign

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAVES = 64  # of the tree; above it near heads stand together


def draw_map(compared: Comparison, profile: Profile | None = None) -> Drawing:
    """A place for every head, near those that look at the same; coloured by role where a profile is given."""
    places = compared.embedding()  # (H, 2)
    roles, colours = _roles(compared, profile)
    figure = make_figure(6.4, 5.6)
    panel = figure.subplots()
    panel.scatter(*places.T, s=22, c=colours, linewidths=0.4, edgecolors="#ffffff")
    kept = np.corrcoef(pdist(places), squareform(np.sqrt(compared["js"]), checks=False))[0, 1]
    seen = f"{len(places)} heads on {compared.rows} rows of {compared.texts} texts"
    title = f"{seen}; distances here and true ones: r {kept:.2f}"
    panel.set_title(title, fontsize=8, color=INK, loc="left")
    tidy(panel, "distance is √(Jensen–Shannon divergence) of where heads look", "")
    panel.set_aspect("equal", adjustable="datalim")
    order = np.argsort([role == "unclear" for role in roles], kind="stable")  # those with a role are named first
    _name(panel, places[order], [_head_label(str(compared.addresses[i]), roles[i]) for i in order])
    _legend(panel, roles)
    rows = [
        {"head": str(address), "role": role, "x": float(x), "y": float(y)}
        for address, role, (x, y) in zip(compared.addresses, roles, places, strict=True)
    ]
    return Drawing(figure, rows)


def draw_clusters(compared: Comparison, profile: Profile | None = None) -> Drawing:
    """The tree of average linkage: heads that join far to the left look at the same; the line is the null.

    The line is as near as a head is to itself on other text. With many heads, those nearest stand on one line.
    """
    roles, colours = _roles(compared, profile)
    tree = linkage(squareform(np.sqrt(compared["js"]), checks=False), "average")
    count = min(len(compared.addresses), LEAVES)
    drawn = dendrogram(tree, p=count, truncate_mode="lastp", no_plot=True)
    figure = make_figure(6.8, 0.16 * count + 1.0)
    panel = figure.subplots()
    for across, along in zip(drawn["dcoord"], drawn["icoord"], strict=True):
        panel.plot(across, along, color=FAINT, linewidth=0.9)
    near = float(np.sqrt(np.median(compared.nulls["js"])))
    if np.isfinite(near):
        panel.axvline(near, color="#b5402f", linewidth=0.8, linestyle="--")
    panel.set_yticks([10 * i + 5 for i in range(count)], [""] * count)
    panel.set_xlim(left=0)
    rows = []
    for place, leaf in enumerate(drawn["leaves"]):
        members = _members(tree, leaf, len(compared.addresses))
        rows += [{"head": str(compared.addresses[i]), "role": roles[i], "leaf": place} for i in members]
        names = ", ".join(str(compared.addresses[i]) for i in members[:4]) + (
            f" +{len(members) - 4}" if members[4:] else ""
        )
        told = roles[members[0]] if len(members) == 1 and roles[members[0]] != "unclear" else ""
        panel.text(-0.01, 10 * place + 5, f"{told}  {names}".strip(), transform=panel.get_yaxis_transform(), ha="right",
                   va="center", fontsize=7, color=colours[members[0]] if told else INK)  # fmt: skip
    panel.set_ylim(10 * count, 0)
    tidy(panel, "√(Jensen–Shannon divergence) at which they join; dashed: a head and itself on other text")
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
    return Drawing(figure, rows)


def _roles(compared: Comparison, profile: Profile | None) -> tuple[list[str], list[str]]:
    """Every head's role and colour; grey where there is none, or no profile."""
    known = {} if profile is None else {head.address: head.role for head in profile}
    roles = [known.get(address, "unclear") for address in compared.addresses]
    return roles, ["#c3c8ce" if role == "unclear" else sign(role)[1] for role in roles]


def _head_label(head: str, role: str) -> str:
    return head if role == "unclear" else f"{head} {sign(role)[0]}"


def _name(panel: "Axes", places: np.ndarray, names: list[str]) -> None:
    """Names beside as many dots as there is room for: none over another name, none over another dot."""
    figure = panel.get_figure()
    assert figure is not None
    figure.canvas.draw()  # where things are is known only now
    taken: list[tuple[float, float]] = []
    dots = panel.transData.transform(places)
    for place, (x, y), name in zip(places, dots, names, strict=True):
        covered = (dots[:, 0] > x + 2) & (dots[:, 0] < x + 40) & (abs(dots[:, 1] - y - 4) < 9)
        if not covered.any() and all(abs(x - a) > 40 or abs(y - b) > 11 for a, b in taken):
            taken.append((x, y))
            panel.annotate(name, place, xytext=(4, 2), textcoords="offset points", fontsize=6, color=INK)


def _legend(panel: "Axes", roles: list[str]) -> None:
    from matplotlib.lines import Line2D

    found = sorted(set(roles) - {"unclear"})
    dots = [
        Line2D([], [], marker="o", linestyle="", color=sign(role)[1], markersize=4, label=f"{sign(role)[0]}  {role}")
        for role in found
    ]
    if dots:
        panel.legend(
            handles=dots, fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), labelcolor=INK
        )


def _members(tree: np.ndarray, node: int, heads: int) -> list[int]:
    """The heads under a node of the tree."""
    if node < heads:
        return [node]
    left, right = tree[node - heads, :2].astype(int)
    return sorted(_members(tree, left, heads) + _members(tree, right, heads))
