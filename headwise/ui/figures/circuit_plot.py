"""Figures of a circuit: faithfulness over its size next to random sets, and the graph by layers."""

from typing import TYPE_CHECKING

from headwise.ui.circuit_layout import CircuitLayout, drawn_edges, largest_effect, place_nodes
from headwise.ui.figures.figure_with_data import (
    BACKGROUND,
    LINE_COLORS,
    MUTED_COLOR,
    TEXT_COLOR,
    FigureWithData,
    make_figure,
)
from headwise.ui.figures.tradeoff_curves import draw_tradeoff

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from headwise.analysis.circuits.circuit_result import CircuitResult


def draw_faithfulness_curves(result: "CircuitResult") -> FigureWithData:
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


NODE_COLORS = {
    "head": LINE_COLORS[0], "kv": LINE_COLORS[2], "mlp": LINE_COLORS[3], "embedding": TEXT_COLOR, "logits": TEXT_COLOR,
}  # fmt: skip
MAX_EDGE_WIDTH = 6.0


def draw_circuit_graph(result: "CircuitResult") -> FigureWithData:
    """Draw the members of a circuit by layers, and the edges whose interval excludes 0. The width is the size of the effect.

    Args:
        result: The result. Without measured edges, only the members are drawn.
    """
    layout, edges = place_nodes(result), drawn_edges(result)
    figure = make_figure(max(4.0, 0.75 * layout.columns + 1.6), max(3.0, 0.42 * len(layout.rows) + 0.8))
    axes = figure.subplots()
    largest = largest_effect(edges)
    for index, (sender, receiver, edge) in enumerate(reversed(edges)):
        start, end = layout.nodes[sender], layout.nodes[receiver]
        bow = (0.25 if start.column == end.column else 0.08) * (1 if index % 2 else -1)
        axes.annotate(
            "", (end.column, end.row), (start.column, start.row),
            arrowprops={
                "arrowstyle": "-", "connectionstyle": f"arc3,rad={bow}", "alpha": 0.55,
                "color": LINE_COLORS[0] if edge.effect.value > 0 else LINE_COLORS[4],
                "linewidth": max(0.4, MAX_EDGE_WIDTH * abs(edge.effect.value) / largest),
            },
        )  # fmt: skip
    _draw_nodes(axes, layout)
    edges_text = (
        f"{len(edges)} of {len(result.edges)} edges with an interval that excludes 0" if result.edges else "no edges"
    )
    axes.set_title(f"{result.settings.task}: {result.circuit.size} nodes, {edges_text}", fontsize=9, color=TEXT_COLOR)
    rows = [
        {
            "sender": edge.sender, "receiver": edge.receiver, "effect": edge.effect.value, "low": edge.effect.low,
            "high": edge.effect.high,
        }
        for edge in result.edges
    ]  # fmt: skip
    return FigureWithData(figure, rows or [{"node": node} for node in result.circuit.nodes])


def _draw_nodes(axes: "Axes", layout: CircuitLayout) -> None:
    for item in layout.nodes.values():
        axes.text(
            item.column, item.row, item.node, ha="center", va="center", fontsize=7, color=BACKGROUND,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": NODE_COLORS[item.kind], "edgecolor": BACKGROUND},
        )  # fmt: skip
    axes.set_xlim(-0.6, layout.columns - 0.4)
    axes.set_ylim(-0.6, len(layout.rows) - 0.4)
    axes.set_yticks(range(len(layout.rows)), layout.rows, fontsize=7, color=TEXT_COLOR)
    axes.set_xticks([])
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)
