"""Training history: a metric of every head during training, layer by layer."""

from typing import TYPE_CHECKING

from headwise.analysis.roles.head_history import HeadHistory
from headwise.spec import Address
from headwise.ui.figures.figure_with_data import LINE_COLORS, MUTED_COLOR, TEXT_COLOR, FigureWithData, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LABELED_HEADS = 3  # labeled heads per layer
LINE_STYLES = ("-", "--", ":", "-.")  # for layers with more heads than colors


def draw_history(history: HeadHistory, metric: str = "induction") -> FigureWithData:
    """Plot a metric against the step, one panel per layer, one line per head. The highest heads of a layer are labeled."""
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
        f"{metric} during training; highest at the end: head {best}, {value:.3f}", fontsize=10, color=TEXT_COLOR
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
    finite_heads = [head for head in heads if trajectories[head][-1] == trajectories[head][-1]]  # excludes NaN
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
