"""Cutting, shown: what it brought and cost as tables, and the curve of loss against heads kept as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from headwise.change.curve import Curve
from headwise.change.plan import Plan
from headwise.change.report import Report
from headwise.errors import HeadwiseError
from headwise.show.attend import COLOURS, FAINT, INK, KINDS, PAPER
from headwise.show.tables import make_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Small losses matter and large ones are a hundred times as large: where there are such, the axis is even up to EVEN only,
# and beyond it every tenfold takes the same room.
EVEN, TICKS = 0.1, (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print which heads go."""
    (console or Console()).print(str(plan), highlight=False)


def show_report(report: Report, console: Console | None = None) -> None:
    """Print sizes and speed, then losses."""
    console = console or Console()
    rows = [[name, _number(a), _number(b), f"{share:.3f}" if a else ""] for name, a, b, share in report.rows()]
    console.print(make_table("What cutting brought", ["", "before", "after", "share"], rows))
    title = f"What it cost: loss, {report.metric}, {report.texts} texts, with 95 % intervals"
    console.print(make_table(title, ["", "mean", "low", "high"], report.losses()))


def show_curve(curve: Curve, console: Console | None = None) -> None:
    """Print every cut."""
    title = f"Loss, {curve.metric}, {curve.texts} texts; the full model's is {curve.full.mean:.3f}. "
    title += f"Of {curve.seeds} random cuts: mean, least, most"
    columns = ["by", "kept", "heads", "loss", "more than full", "low", "high"]
    (console or Console()).print(make_table(title, columns, curve.rows()))


def draw_curve(curve: Curve, path: str | Path) -> Path:
    """Draw how much more is lost than by the full model, against the share of heads kept; bands are intervals."""
    from matplotlib.figure import Figure

    path = check_picture(path)
    figure = Figure(figsize=(6.4, 4.2), facecolor=PAPER, layout="constrained")
    panel = figure.subplots()
    for i, by in enumerate(dict.fromkeys(point.by for point in curve.points)):
        _line(panel, curve, by, FAINT if by == "random" else COLOURS[i % len(COLOURS)])
    panel.axhline(0, color=INK, linewidth=0.6)
    if max(point.more.mean for point in curve.points) > TICKS[-3]:
        panel.set_yscale("symlog", linthresh=EVEN)
        panel.set_yticks(TICKS, labels=[f"{tick:g}" for tick in TICKS], minor=False)
        panel.set_yticks([], minor=True)
    panel.set_xlim(1.02, 0)
    panel.set_xlabel("share of heads kept", fontsize=9, color=INK)
    panel.set_ylabel(f"loss above the full model's, {curve.metric}", fontsize=9, color=INK)
    panel.tick_params(labelsize=8, colors=INK)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.legend(fontsize=8, frameon=False, loc="upper left", labelcolor=INK)
    told = f"{curve.texts} texts; the full model's loss is {curve.full.mean:.3f}; bands: 95 % over texts, "
    panel.set_title(f"{told}for random the least and most of {curve.seeds}", fontsize=8, color=INK, loc="left")
    figure.savefig(path, dpi=160)
    return path


def check_picture(path: str | Path) -> Path:
    """Whether a picture can be written there; asked before long work."""
    path = Path(path)
    if path.suffix.lower() not in KINDS:
        raise HeadwiseError(f"a picture is written as {', '.join(KINDS)}; got {str(path)!r}.")
    if not path.parent.is_dir():
        raise HeadwiseError(f"there is no folder {path.parent} to write {path.name} into; make it first.")
    return path


def _line(panel: "Axes", curve: Curve, by: str, colour: str) -> None:
    points = curve.of(by)
    kept = [1.0, *(point.keep for point in points)]
    mean, low, high = ([0.0, *(getattr(p.more, end) for p in points)] for end in ("mean", "low", "high"))
    panel.fill_between(kept, low, high, color=colour, alpha=0.18, linewidth=0)
    panel.plot(kept, mean, color=colour, linewidth=1.4, marker="o", markersize=3, label=by)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
