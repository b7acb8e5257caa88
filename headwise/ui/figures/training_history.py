"""Biographies: how every head's measure went while a model was trained, layer by layer."""

from typing import TYPE_CHECKING

from headwise.analysis.roles.history import HeadHistory
from headwise.spec import Address
from headwise.ui.figures.figure_io import COLOURS, FAINT, INK, Drawing, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMED = 3  # heads of a layer that are named in its panel
DASHES = ("-", "--", ":", "-.")  # when a layer has more heads than there are colours


def draw_lives(history: HeadHistory, measure: str = "induction") -> Drawing:
    """A measure over the steps: a panel for each layer, a line for each head, the strongest of a layer named."""
    best, value = history.best(measure)
    layers: dict[str, list[str]] = {}
    for head in history.addresses:
        layers.setdefault(str(Address.parse(head).site), []).append(head)
    columns = min(4, len(layers))
    down = -(-len(layers) // columns)
    figure = make_figure(2.9 * columns + 0.6, 2.1 * down + 0.6)
    panels = list(figure.subplots(down, columns, sharex=True, sharey=True, squeeze=False).flat)
    for panel, (layer, heads) in zip(panels, layers.items(), strict=False):
        _panel(panel, history, measure, layer, heads)
    for panel in panels[len(layers) :]:
        panel.axis("off")
    figure.suptitle(f"{measure} while training; most at the end: head {best}, {value:.3f}", fontsize=10, color=INK)
    figure.supxlabel("step", fontsize=8, color=FAINT)
    rows = [
        {"head": head, "measure": measure, "step": step, "value": value}
        for head in history.addresses
        for step, value in zip(history.steps, history.of(head, measure), strict=True)
    ]
    return Drawing(figure, rows)


def _panel(panel: "Axes", history: HeadHistory, measure: str, layer: str, heads: list[str]) -> None:
    lives = {head: history.of(head, measure) for head in heads}
    known = [head for head in heads if lives[head][-1] == lives[head][-1]]  # not those without a number
    named = sorted(known, key=lambda head: lives[head][-1], reverse=True)[:NAMED]
    for i, (head, life) in enumerate(lives.items()):
        number = Address.parse(head).head
        panel.plot(history.steps, life, color=COLOURS[i % len(COLOURS)], linewidth=1.4 if head in named else 0.7,
                   linestyle=DASHES[i // len(COLOURS) % len(DASHES)], alpha=1.0 if head in named else 0.5,
                   marker="o" if len(life) == 1 else None, label=f"head {number}" if head in named else None)  # fmt: skip
    panel.set_title(f"layer {layer}", fontsize=9, color=INK, loc="left", fontweight="bold")
    panel.tick_params(labelsize=7, colors=FAINT)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    if named:
        panel.legend(fontsize=6, frameon=False, loc="best", labelcolor=INK)
