"""Scores of all heads at a job, layer by layer, with their baselines."""

from headwise.analysis.finding.head_search_result import HeadSearchResult
from headwise.spec import Address
from headwise.ui.figures.figure_with_data import (
    LINE_COLORS,
    MUTED_COLOR,
    TEXT_COLOR,
    FigureWithData,
    make_figure,
    style_axes,
)

MAX_LABELED_HEADS = 12


def draw_head_search(result: HeadSearchResult) -> FigureWithData:
    """Plot the score of every head against its layer. Heads that do the job are labeled and have an interval."""
    layers = [item.layer for item in result.by_layer()]
    figure = make_figure(max(5.0, 0.45 * len(layers) + 1.5), 3.4)
    axes = figure.subplots()
    for item in result:
        address = Address.parse(item.address)
        x = layers.index(str(address.layer_address))
        if item.is_supported:
            axes.plot([x, x], item.interval, color=LINE_COLORS[0], linewidth=1.2, zorder=2)
        axes.plot(
            x, item.score, "o", markersize=6 if item.is_supported else 3.5, zorder=3,
            color=LINE_COLORS[0] if item.is_supported else MUTED_COLOR,
        )  # fmt: skip
        axes.plot(x, item.baseline, "_", color=LINE_COLORS[1], markersize=9, zorder=1)
    for item in list(result)[:MAX_LABELED_HEADS]:
        if item.is_supported:
            x = layers.index(str(Address.parse(item.address).layer_address))
            axes.annotate(
                item.address, (x, item.score), xytext=(5, 2), textcoords="offset points", fontsize=7, color=TEXT_COLOR
            )
    axes.set_xticks(range(len(layers)), layers)
    style_axes(axes, "layer", "score" if result.table.is_bounded else "effect")
    figure.suptitle(
        f"{len(result.supported_heads)} of {len(result)} heads do the job '{result.job}' (filled, 95% CI); orange: baseline",
        fontsize=9, color=TEXT_COLOR,
    )  # fmt: skip
    rows = [
        {
            "head": item.address, "evidence": item.evidence_level, "score": item.score, "low": item.interval[0],
            "high": item.interval[1], "baseline": item.baseline, "gain": item.gain, "p": item.p,
        }
        for item in result
    ]  # fmt: skip
    return FigureWithData(figure, rows)
