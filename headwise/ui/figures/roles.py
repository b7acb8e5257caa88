"""The role grid: every head of a model, by layer and number, with its role and how sure that is."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from headwise.analysis.roles.profile_result import HeadProfile, Profile
from headwise.ui.figures.figure_io import FAINT, INK, Drawing, make_figure
from headwise.ui.role_badges import letter_ink, sign

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STRENGTH = {"selective": 0.55, "effective": 0.75, "causal": 1.0}
RESTS = {"sink": "first token", "special token": "special token", "broad": "everywhere alike", "idle": "writes nothing"}
EMPTY = "#f0f2f4"
RUNGS = "#1f6fb4"  # of the legend alone
CELL = 0.31  # inches


def draw_roles(profile: Profile) -> Drawing:
    """Layers from left to right, heads downwards: two letters and a colour for a role, the stronger the higher its rung."""
    layers = {layer: column for column, layer in enumerate(profile.about["layers"])}
    tall = 1 + max((address.head for address in profile.addresses), default=0)
    found = Counter(head.role for head in profile if head.role != "unclear")
    wide = max(5.5, CELL * len(layers) + 0.8)
    columns = max(1, int(wide / 2.05))
    figure = make_figure(wide, CELL * tall + 1.0 + 0.19 * -(-(len(found) + 4) // columns))
    panel = figure.subplots()
    for head in profile:
        _cell(panel, head, layers[str(head.address.site)])
    panel.set_xlim(-0.55, len(layers) - 0.45)
    panel.set_ylim(tall - 0.45, -0.55)
    panel.set_aspect("equal")
    panel.set_xticks(range(len(layers)), list(layers), fontsize=7, color=INK)
    panel.set_yticks(range(tall), [str(head) for head in range(tall)], fontsize=7, color=INK)
    panel.tick_params(length=0)
    panel.set_xlabel("layer", fontsize=8, color=INK)
    panel.set_ylabel("head", fontsize=8, color=INK)
    for spine in panel.spines.values():
        spine.set_visible(False)
    about = profile.about
    title = f"{sum(found.values())} of {len(profile)} heads have a role; {about['texts']:,} texts, {about['tokens']:,} tokens"
    panel.set_title(title, fontsize=9, color=INK, loc="left")
    _legend(figure, found, columns)
    return Drawing(figure, rows_of(profile))


def rows_of(profile: Profile) -> list[dict[str, Any]]:
    """One row per head: its role with rung, score and null, and where it rests."""
    wanted = ("head", "role", "detail", "rung", "score", "null", "low", "high", "effect", "rest")
    return [{name: row[name] for name in wanted} for row in profile.table()]


def _cell(panel: "Axes", head: HeadProfile, column: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    row = head.address.head
    letters, colour = sign(head.role) if head.role != "unclear" else (_resting(head), EMPTY)
    strength = STRENGTH.get(head.rung, 1.0) if head.role != "unclear" else 1.0
    panel.add_patch(
        FancyBboxPatch((column - 0.44, row - 0.44), 0.88, 0.88, boxstyle="round,pad=0,rounding_size=0.12", linewidth=0,
                       facecolor=colour, alpha=strength)
    )  # fmt: skip
    ink = FAINT if head.role == "unclear" else letter_ink(colour) if strength > 0.7 else INK
    panel.text(column, row, letters, ha="center", va="center_baseline", fontsize=7, color=ink)


def _resting(head: HeadProfile) -> str:
    return {"sink": "‥", "special token": "‥", "broad": "~", "idle": "_"}.get(head.rest[0], "") if head.rest else ""


def _legend(figure: Any, found: Counter[str], columns: int) -> None:
    """Every role found with the number of its heads, then what is grey, and what the three strengths mean."""
    from matplotlib.patches import Patch

    lines = [(sign(role)[1], f"{sign(role)[0]}  {role} ({count})") for role, count in sorted(found.items())]
    lines += [(EMPTY, "no role;  ‥ rests on a token, ~ on all")]
    patches = [Patch(facecolor=colour, label=label) for colour, label in lines]
    patches += [Patch(facecolor=RUNGS, alpha=strength, label=f"rung: {rung}") for rung, strength in STRENGTH.items()]
    figure.legend(
        handles=patches, loc="outside lower left", ncols=columns, fontsize=7, frameon=False, labelcolor=INK,
        handlelength=1.0, handleheight=1.0, columnspacing=1.2,
    )  # fmt: skip
