"""Biographies: how every head's metric went while a model was trained, layer by layer."""

from typing import TYPE_CHECKING

from headwise.analysis.roles.head_history import HeadHistory
from headwise.spec import Address
from headwise.ui.figures.figure_io import LINE_COLORS, MUTED_COLOR, TEXT_COLOR, FigureWithData, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LABELED_HEADS = 3  # heads of a layer that are named in its panel
LINE_STYLES = ("-", "--", ":", "-.")  # when a layer has more heads than there are colours


def draw_history(history: HeadHistory, metric: str = "induction") -> FigureWithData:
    """A metric over the steps: a panel for each layer, a line for each head, the strongest of a layer named."""
    best, value = history.best_head(metric)
    layers: dict[str, list[str]] = {}
    for head in history.addresses:
        layers.setdefault(str(Address.parse(head).layer_address), []).append(head)
    columns = min(4, len(layers))
    num_rows = -(-len(layers) // columns)
    figure = make_figure(2.9 * columns + 0.6, 2.1 * num_rows + 0.6)
    panel_axes = list(figure.subplots(num_rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, (layer, heads) in zip(panel_axes, layers.items(), strict=False):
        _draw_layer(axes, history, metric, layer, heads)
    for axes in panel_axes[len(layers) :]:
        axes.axis("off")
    figure.suptitle(
        f"{metric} while training; most at the end: head {best}, {value:.3f}", fontsize=10, color=TEXT_COLOR
    )
    figure.supxlabel("step", fontsize=8, color=MUTED_COLOR)
    rows = [
        {"head": head, "measure": metric, "step": step, "value": value}
        for head in history.addresses
        for step, value in zip(history.steps, history.curve(head, metric), strict=True)
    ]
    return FigureWithData(figure, rows)


def _draw_layer(axes: "Axes", history: HeadHistory, metric: str, layer: str, heads: list[str]) -> None:
    trajectories = {head: history.curve(head, metric) for head in heads}
    finite_heads = [
        head for head in heads if trajectories[head][-1] == trajectories[head][-1]
    ]  # not those without a number
    labeled = sorted(finite_heads, key=lambda head: trajectories[head][-1], reverse=True)[:MAX_LABELED_HEADS]
    for i, (head, trajectory) in enumerate(trajectories.items()):
        head_number = Address.parse(head).head
        axes.plot(history.steps, trajectory, color=LINE_COLORS[i % len(LINE_COLORS)],
                   linewidth=1.4 if head in labeled else 0.7,
                   linestyle=LINE_STYLES[i // len(LINE_COLORS) % len(LINE_STYLES)], alpha=1.0 if head in labeled else 0.5,
                   marker="o" if len(trajectory) == 1 else None,
                   label=f"head {head_number}" if head in labeled else None)  # fmt: skip
    axes.set_title(f"layer {layer}", fontsize=9, color=TEXT_COLOR, loc="left", fontweight="bold")
    axes.tick_params(labelsize=7, colors=MUTED_COLOR)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if labeled:
        axes.legend(fontsize=6, frameon=False, loc="best", labelcolor=TEXT_COLOR)
