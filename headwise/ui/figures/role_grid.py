"""Role grid: every head by layer and number, with its role and evidence level."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_result import Profile
from headwise.ui.figures.figure_with_data import MUTED_COLOR, TEXT_COLOR, FigureWithData, make_figure
from headwise.ui.role_badges import role_badge, text_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVEL_ALPHA = {"attention": 0.55, "value-weighted": 0.75, "causal": 1.0}
NO_ROLE_COLOR = "#f0f2f4"
LEVEL_COLOR = "#1f6fb4"  # only in the legend
CELL_INCHES = 0.31


def draw_roles(profile: Profile) -> FigureWithData:
    """Plot layers from left to right, heads downward. Letters and color show the role, opacity the evidence level."""
    layers = {layer: column for column, layer in enumerate(profile.metadata["layers"])}
    num_rows = 1 + max((address.head for address in profile.addresses), default=0)
    role_counts = Counter(head.role for head in profile if head.role != "unclear")
    figure_width = max(5.5, CELL_INCHES * len(layers) + 0.8)
    columns = max(1, int(figure_width / 2.05))
    figure = make_figure(figure_width, CELL_INCHES * num_rows + 1.0 + 0.19 * -(-(len(role_counts) + 4) // columns))
    axes = figure.subplots()
    for head in profile:
        _draw_cell(axes, head, layers[str(head.address.layer_address)])
    axes.set_xlim(-0.55, len(layers) - 0.45)
    axes.set_ylim(num_rows - 0.45, -0.55)
    axes.set_aspect("equal")
    axes.set_xticks(range(len(layers)), list(layers), fontsize=7, color=TEXT_COLOR)
    axes.set_yticks(range(num_rows), [str(head) for head in range(num_rows)], fontsize=7, color=TEXT_COLOR)
    axes.tick_params(length=0)
    axes.set_xlabel("layer", fontsize=8, color=TEXT_COLOR)
    axes.set_ylabel("head", fontsize=8, color=TEXT_COLOR)
    for spine in axes.spines.values():
        spine.set_visible(False)
    about = profile.metadata
    title = (
        f"{sum(role_counts.values())} of {len(profile)} heads have a role; {about['texts']:,} texts, "
        f"{about['tokens']:,} tokens"
    )
    axes.set_title(title, fontsize=9, color=TEXT_COLOR, loc="left")
    _legend(figure, role_counts, columns)
    return FigureWithData(figure, role_rows_by_head(profile))


def role_rows_by_head(profile: Profile) -> list[dict[str, Any]]:
    """Return one row per head: role, evidence level, score, baseline and idle pattern."""
    columns = ("head", "role", "detail", "evidence_level", "score", "baseline", "low", "high", "effect", "idle_pattern")
    return [{name: row[name] for name in columns} for row in profile.table()]


def _draw_cell(axes: "Axes", head: HeadProfile, column: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    row = head.address.head
    letters, color = role_badge(head.role) if head.role != "unclear" else (_idle_symbol(head), NO_ROLE_COLOR)
    strength = LEVEL_ALPHA.get(head.evidence_level, 1.0) if head.role != "unclear" else 1.0
    axes.add_patch(
        FancyBboxPatch((column - 0.44, row - 0.44), 0.88, 0.88, boxstyle="round,pad=0,rounding_size=0.12", linewidth=0,
                       facecolor=color, alpha=strength)
    )  # fmt: skip
    ink = MUTED_COLOR if head.role == "unclear" else text_color(color) if strength > 0.7 else TEXT_COLOR
    axes.text(column, row, letters, ha="center", va="center_baseline", fontsize=7, color=ink)


def _idle_symbol(head: HeadProfile) -> str:
    return (
        {"sink": "‥", "special token": "‥", "broad": "~", "idle": "_"}.get(head.idle_pattern[0], "")
        if head.idle_pattern
        else ""
    )


def _legend(figure: Any, role_counts: Counter[str], columns: int) -> None:
    """Add the legend: roles with their number of heads, idle symbols, and evidence levels."""
    from matplotlib.patches import Patch

    lines = [
        (role_badge(role)[1], f"{role_badge(role)[0]}  {role} ({count})") for role, count in sorted(role_counts.items())
    ]
    lines += [(NO_ROLE_COLOR, "no role;  ‥ sink, ~ diffuse, _ inactive")]
    patches = [Patch(facecolor=color, label=label) for color, label in lines]
    patches += [
        Patch(facecolor=LEVEL_COLOR, alpha=strength, label=f"evidence: {level}")
        for level, strength in LEVEL_ALPHA.items()
    ]
    figure.legend(
        handles=patches, loc="outside lower left", ncols=columns, fontsize=7, frameon=False, labelcolor=TEXT_COLOR,
        handlelength=1.0, handleheight=1.0, columnspacing=1.2,
    )  # fmt: skip
