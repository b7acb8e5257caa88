"""Trade-off curves: what is lost against what is spared, with bands. A pruning curve is one of them."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headwise.compression.curve import Curve
from headwise.errors import HeadwiseError
from headwise.ui.figures.figure_io import COLOURS, FAINT, INK, Drawing, make_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEEDED = ("x", "mean")  # of every row; low and high make a band, line names the line it belongs to
# Small losses matter and large ones are a hundred times as large: where there are such, the axis is even up to EVEN only,
# and beyond it every tenfold takes the same room.
EVEN, TICKS = 0.1, (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def draw_tradeoff(
    rows: Iterable[Mapping[str, Any]], x: str = "", y: str = "loss", title: str = "", *, log: bool = False
) -> Drawing:
    """Lines of rows with `x`, `mean`, and if known `low`, `high` (a band) and `line` (its name); x and y name the axes.

    With `log`, each doubling of x takes the same room.

    >>> made = [{"x": heads, "mean": 2 / heads, "low": 1.9 / heads, "high": 2.1 / heads} for heads in (1, 2, 4, 8)]
    >>> len(draw_tradeoff(made, "heads").figure.axes[0].lines)
    1
    """
    told = [dict(row) for row in rows]
    if not told or any(name not in row for row in told for name in NEEDED):
        raise HeadwiseError("a curve is drawn from rows with x and mean, and perhaps low, high and line.")
    figure = make_figure(6.4, 4.2)
    panel = figure.subplots()
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in told:
        lines.setdefault(str(row.get("line", "")), []).append(row)
    for i, (name, points) in enumerate(lines.items()):
        _line(
            panel, name, sorted(points, key=lambda p: p["x"]), FAINT if name == "random" else COLOURS[i % len(COLOURS)]
        )
    tidy(panel, x, y)
    if log:
        panel.set_xscale("log", base=2)
        at = sorted({row["x"] for row in told})
        panel.set_xticks(at, labels=[f"{value:g}" for value in at])
        panel.set_xticks([], minor=True)
    if any(lines):
        panel.legend(fontsize=8, frameon=False, loc="best", labelcolor=INK)
    panel.set_title(title, fontsize=8, color=INK, loc="left")
    return Drawing(figure, told)


def draw_pruning(curve: Curve) -> Drawing:
    """How much more is lost than by the full model, against the share of heads kept; bands are intervals."""
    rows = [
        {"line": p.by, "x": p.kept, "heads": p.heads, "mean": p.more.mean, "low": p.more.low, "high": p.more.high}
        for p in curve.points
    ]
    whole = [
        {"line": by, "x": 1.0, "mean": 0.0, "low": 0.0, "high": 0.0} for by in dict.fromkeys(r["line"] for r in rows)
    ]
    told = f"{curve.texts} texts; the full model's loss is {curve.full.mean:.3f}; bands: 95 % over texts, "
    told += f"for random the least and most of {curve.seeds}"
    drawn = draw_tradeoff([*whole, *rows], "share of heads kept", f"loss above the full model's, {curve.metric}", told)
    panel = drawn.figure.axes[0]
    panel.axhline(0, color=INK, linewidth=0.6)
    if max(row["mean"] for row in rows) > TICKS[-3]:
        panel.set_yscale("symlog", linthresh=EVEN)
        panel.set_yticks(TICKS, labels=[f"{tick:g}" for tick in TICKS], minor=False)
        panel.set_yticks([], minor=True)
        panel.set_ylim(bottom=min(-EVEN / 10, *(1.2 * row["low"] for row in rows)))
    panel.set_xlim(1.02, 0)
    return Drawing(drawn.figure, rows)


def _line(panel: "Axes", name: str, points: list[dict[str, Any]], colour: str) -> None:
    x, mean = ([point[what] for point in points] for what in NEEDED)
    if all(point.get(end) is not None for point in points for end in ("low", "high")):
        low, high = ([point[end] for point in points] for end in ("low", "high"))
        panel.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    panel.plot(x, mean, color=colour, linewidth=1.4, marker="o", markersize=3, label=name)
