"""Faithfulness of a circuit over its size, next to random sets."""

from typing import TYPE_CHECKING

from headwise.ui.figures.figure_with_data import MUTED_COLOR, TEXT_COLOR, FigureWithData
from headwise.ui.figures.tradeoff_curves import draw_tradeoff

if TYPE_CHECKING:
    from headwise.analysis.circuits.circuit_result import CircuitResult


def draw_circuit(result: "CircuitResult") -> FigureWithData:
    """Plot faithfulness over sizes on the judged prompts, with 95% intervals, and the range of the random sets.

    Args:
        result: The result.
    """
    rows = [
        {
            "line": curve.ablation, "x": point.size, "mean": point.faithfulness.value, "low": point.faithfulness.low,
            "high": point.faithfulness.high,
        }
        for curve in result.curves
        for point in curve.points
    ]  # fmt: skip
    title = f"{result.settings.task}: {result.settings.prompts[2]} judged prompts; dashed: chosen size"
    if result.circuit.random_sets is not None:
        title += f"; gray: {len(result.circuit.random_sets.faithfulness)} random sets"
    figure = draw_tradeoff(rows, "nodes in the circuit", "faithfulness F", title).figure
    axes = figure.axes[0]
    axes.set_xscale("log")
    axes.set_ylim(-0.5, 1.5)
    axes.axhline(1, color=TEXT_COLOR, linewidth=0.6)
    axes.axhline(0, color=TEXT_COLOR, linewidth=0.6)
    axes.axvline(result.circuit.size, color=TEXT_COLOR, linewidth=0.8, linestyle="--")
    if result.circuit.random_sets is not None:
        values = result.circuit.random_sets.faithfulness
        axes.vlines(result.circuit.size, min(values), max(values), color=MUTED_COLOR, linewidth=5)
    return FigureWithData(figure, rows)
