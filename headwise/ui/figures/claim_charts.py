"""Plot of a claim: lines if its conditions are numbers, bars if they are names."""

from math import isfinite
from typing import TYPE_CHECKING

from headwise.errors import ArgumentError
from headwise.experiments.engine.statistic import Condition, Statistic
from headwise.experiments.head_count_sweep import HeadSweep
from headwise.experiments.run_claims import ClaimResult
from headwise.ui.figures.figure_with_data import (
    LINE_COLORS,
    TEXT_COLOR,
    FigureWithData,
    escape_dollar,
    make_figure,
    style_axes,
)
from headwise.ui.figures.tradeoff_curves import draw_tradeoff

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def has_plottable_statistics(result: ClaimResult) -> bool:
    """Return whether any statistic of the plot was measured."""
    return any(_finite(result.statistics.by_condition(name)) for name in result.claim.plot.statistics)


def draw_claim(result: ClaimResult) -> FigureWithData:
    """Plot the statistics of a claim with their intervals. The title has the verdict."""
    plot_spec = result.claim.plot
    selected = {
        name: statistics
        for name in plot_spec.statistics
        if (statistics := _finite(result.statistics.by_condition(name)))
    }
    if not selected:
        raise ArgumentError(
            f"{result.claim.name}: there is nothing to plot, because none of the statistics of this claim was measured: "
            f"{', '.join(plot_spec.statistics)}. Run the claim on a model that supports at least one of them."
        )
    title = f"{result.claim.name}: {result.verdict.word}" + (
        f" ({result.few_seeds_note})" if result.has_few_seeds else ""
    )
    if all(isinstance(at, int | float) for statistics in selected.values() for at in statistics):
        rows = [
            {"line": name if len(selected) > 1 else "", "x": at, "mean": f.mean, "low": f.low, "high": f.high}
            for name, statistics in selected.items()
            for at, f in statistics.items()
        ]
        return draw_tradeoff(rows, plot_spec.x, plot_spec.y, title, log=plot_spec.log_x)
    return _draw_bars(selected, plot_spec.y, title)


def _finite(statistics: dict[Condition, Statistic]) -> dict[Condition, Statistic]:
    return {at: statistic for at, statistic in statistics.items() if isfinite(statistic.mean)}


def draw_sweep(sweep: HeadSweep) -> FigureWithData:
    """Plot the held-out loss against the number of heads, with a confidence band over seeds."""
    rows = [
        {"x": row.heads, "mean": row.loss.mean, "low": row.loss.low, "high": row.loss.high, "head_dim": row.head_dim}
        for row in sweep.rows
    ]
    title = (
        f"width {sweep.width}, constant {sweep.constant}, {sweep.steps} steps, {sweep.seeds} seeds; 95% CI over seeds"
    )
    return draw_tradeoff(rows, "heads", "held-out loss, nats per token", title, log=True)


def draw_training_curves(sweep: HeadSweep) -> FigureWithData:
    """Plot the held-out loss during training, one line per model."""
    rows = [{"line": name, "x": p["step"], **p} for name, points in sweep.curves.items() for p in points]
    title = f"constant {sweep.constant}, {sweep.seeds} seeds; 95% CI over seeds"
    return draw_tradeoff(rows, "step", "held-out loss, nats per token", title)


def _draw_bars(selected: dict[str, dict[Condition, Statistic]], y: str, title: str) -> FigureWithData:
    """Plot a group of bars for each condition, with one bar per statistic.

    Nearly equal values of a single statistic, such as losses, are drawn as dots: bars from zero would hide their differences.
    """
    means = [statistic.mean for statistics in selected.values() for statistic in statistics.values()]
    from_zero = len(selected) > 1 or min(means) <= 0 or max(means) > 1.25 * min(means)
    labels = list(dict.fromkeys(at for statistics in selected.values() for at in statistics))
    figure = make_figure(max(5.0, min(11.0, 1.2 + 0.75 * len(labels) * max(1, len(selected) / 2))), 4.2)
    axes = figure.subplots()
    bar_width = 0.8 / len(selected)
    rows = []
    for i, (name, statistics) in enumerate(selected.items()):
        for at, statistic in statistics.items():
            _draw_bar(
                axes,
                labels.index(at) + (i - (len(selected) - 1) / 2) * bar_width,
                bar_width,
                statistic,
                LINE_COLORS[i % len(LINE_COLORS)],
                from_zero=from_zero,
            )
            rows.append(
                {"figure": name, "at": at, "mean": statistic.mean, "low": statistic.low, "high": statistic.high}
            )
        if from_zero:
            axes.bar([0], [0], color=LINE_COLORS[i % len(LINE_COLORS)], label=name)
    style_axes(axes, "", y)
    is_long = max((len(str(label)) for label in labels), default=0) > 10
    tick_labels = [escape_dollar("" if label is None else str(label)) for label in labels]
    axes.set_xticks(
        range(len(labels)), labels=tick_labels, rotation=25 if is_long else 0, ha="right" if is_long else "center"
    )
    if from_zero:
        axes.axhline(0, color=TEXT_COLOR, linewidth=0.6)
    if len(selected) > 1:
        axes.margins(y=0.2 + 0.06 * len(selected))  # space for the legend above the bars
        axes.legend(fontsize=8, frameon=False, loc="upper right", labelcolor=TEXT_COLOR)
    axes.set_title(title, fontsize=8, color=TEXT_COLOR, loc="left")
    return FigureWithData(figure, rows)


def _draw_bar(axes: "Axes", x: float, bar_width: float, statistic: Statistic, color: str, *, from_zero: bool) -> None:
    if not from_zero:
        axes.plot([x], [statistic.mean], "o", color=color)
    else:
        axes.bar([x], [statistic.mean], bar_width * 0.92, color=color)
    if statistic.low is not None and statistic.high is not None:
        axes.vlines([x], [statistic.low], [statistic.high], color=TEXT_COLOR, linewidth=1)
