"""Trade-off curves with confidence bands, for example loss against the fraction of heads kept."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headwise.analysis.steering.steering_result import SteeringResult
from headwise.compression.pruning_curve import PruningCurves
from headwise.errors import ArgumentError
from headwise.ui.figures.figure_with_data import (
    LINE_COLORS,
    MUTED_COLOR,
    TEXT_COLOR,
    FigureWithData,
    make_figure,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REQUIRED_COLUMNS = ("x", "mean")  # optional: low and high (band), line (name of the line)
# If losses span orders of magnitude, the y axis is linear up to LINEAR_LIMIT and logarithmic above it.
LINEAR_LIMIT, TICKS = 0.1, (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def draw_tradeoff(
    rows: Iterable[Mapping[str, Any]], xlabel: str = "", ylabel: str = "loss", title: str = "", *, log: bool = False
) -> FigureWithData:
    """Plot lines with confidence bands.

    Args:
        rows: Dicts with `x` and `mean`; optional `low` and `high` (band) and `line` (name of the line).
        xlabel: Label of the x axis.
        ylabel: Label of the y axis.
        title: Title of the figure.
        log: Use a base-2 logarithmic x axis.

    >>> made = [{"x": heads, "mean": 2 / heads, "low": 1.9 / heads, "high": 2.1 / heads} for heads in (1, 2, 4, 8)]
    >>> len(draw_tradeoff(made, "heads").figure.axes[0].lines)
    1
    """
    row_dicts = [dict(row) for row in rows]
    if not row_dicts or any(name not in row for row in row_dicts for name in REQUIRED_COLUMNS):
        raise ArgumentError(
            "rows: every row needs x and mean; low, high and line are optional. Pass at least one such row."
        )
    figure = make_figure(6.4, 4.2)
    axes = figure.subplots()
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in row_dicts:
        lines.setdefault(str(row.get("line", "")), []).append(row)
    for i, (name, points) in enumerate(lines.items()):
        _draw_line(
            axes,
            name,
            sorted(points, key=lambda p: p["x"]),
            MUTED_COLOR if name == "random" else LINE_COLORS[i % len(LINE_COLORS)],
        )
    style_axes(axes, xlabel, ylabel)
    if log:
        axes.set_xscale("log", base=2)
        ticks = sorted({row["x"] for row in row_dicts})
        axes.set_xticks(ticks, labels=[f"{value:g}" for value in ticks])
        axes.set_xticks([], minor=True)
    if any(lines):
        axes.legend(fontsize=8, frameon=False, loc="best", labelcolor=TEXT_COLOR)
    axes.set_title(title, fontsize=8, color=TEXT_COLOR, loc="left")
    return FigureWithData(figure, row_dicts)


def draw_steering(result: SteeringResult) -> FigureWithData:
    """Plot the held-out effect of a steering and its side effects against the strength, with 95% intervals."""
    names = {
        "effect": "effect",
        "loss": "loss on other text",
        "kl": "KL on other text",
        "distance": "distance on other text",
    }
    curve = result.curve_rows()
    lines = {label: (name, f"{name}_low", f"{name}_high") for name, label in names.items() if name in curve[0]}
    rows = [
        {
            "line": line,
            "x": row["strength"],
            "mean": row[mean],
            "low": row[low],
            "high": row[high],
            "chosen": row["chosen"],
        }
        for row in curve
        for line, (mean, low, high) in lines.items()
    ]
    low, high = min(result.random_effects), max(result.random_effects)
    title = f"{result.num_texts[1]} held-out texts; gray: {len(result.random_effects)} random steerings"
    figure_result = draw_tradeoff(rows, "strength", result.unit, title)
    axes = figure_result.figure.axes[0]
    axes.axhline(0, color=TEXT_COLOR, linewidth=0.6)
    axes.vlines(result.steering.strength, low, high, color=MUTED_COLOR, linewidth=5)
    return FigureWithData(figure_result.figure, rows)


def draw_pruning(curve: PruningCurves) -> FigureWithData:
    """Plot the loss increase over the full model against the fraction of heads kept, with 95% intervals."""
    rows = [
        {
            "line": p.ranking,
            "x": p.kept_fraction,
            "heads": p.heads,
            "mean": p.loss_increase.mean,
            "low": p.loss_increase.low,
            "high": p.loss_increase.high,
        }
        for p in curve.points
    ]
    full_rows = [
        {"line": ranking, "x": 1.0, "mean": 0.0, "low": 0.0, "high": 0.0}
        for ranking in dict.fromkeys(r["line"] for r in rows)
    ]
    title = f"{curve.texts} texts; loss of the full model: {curve.full_loss.mean:.3f}; bands: 95% CI over texts, "
    title += f"for random the minimum and maximum of {curve.seeds} seeds"
    figure_result = draw_tradeoff(
        [*full_rows, *rows], "fraction of heads kept", f"loss increase, {curve.metric}", title
    )
    axes = figure_result.figure.axes[0]
    axes.axhline(0, color=TEXT_COLOR, linewidth=0.6)
    if max(row["mean"] for row in rows) > TICKS[-3]:
        axes.set_yscale("symlog", linthresh=LINEAR_LIMIT)
        axes.set_yticks(TICKS, labels=[f"{tick:g}" for tick in TICKS], minor=False)
        axes.set_yticks([], minor=True)
        axes.set_ylim(bottom=min(-LINEAR_LIMIT / 10, *(1.2 * row["low"] for row in rows)))
    axes.set_xlim(1.02, 0)
    return FigureWithData(figure_result.figure, rows)


def _draw_line(axes: "Axes", name: str, points: list[dict[str, Any]], color: str) -> None:
    x, mean = ([point[column] for point in points] for column in REQUIRED_COLUMNS)
    if all(point.get(end) is not None for point in points for end in ("low", "high")):
        low, high = ([point[end] for point in points] for end in ("low", "high"))
        axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    axes.plot(x, mean, color=color, linewidth=1.4, marker="o", markersize=3, label=name)
