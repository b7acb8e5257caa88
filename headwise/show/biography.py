"""Pictures of a training run: how every head's measure went, layer by layer. Drawn without a display, into a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from headwise.errors import HeadwiseError
from headwise.look.biography import Biography
from headwise.show.attend import COLOURS, FAINT, INK, PAPER
from headwise.spec import Address

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".svg", ".png", ".pdf")
NAMED = 3  # heads of a layer that are named at their line's end
DASHES = ("-", "--", ":", "-.")  # when a layer has more heads than there are colours


def curves(biography: Biography, measure: str, path: str | Path) -> Path:
    """Draw a measure over the steps: a panel for each layer, a line for each head, the strongest of a layer named."""
    from matplotlib.figure import Figure

    path = Path(path)
    if path.suffix.lower() not in KINDS:
        raise HeadwiseError(f"a picture is written as {', '.join(KINDS)}; got {str(path)!r}.")
    if not path.parent.is_dir():
        raise HeadwiseError(f"there is no folder {path.parent} to write {path.name} into; make it first.")
    best, value = biography.best(measure)
    layers = _by_layer(biography)
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    figure = Figure(figsize=(2.9 * columns + 0.6, 2.1 * rows + 0.6), facecolor=PAPER, layout="constrained")
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for panel, (layer, heads) in zip(panels, layers.items(), strict=False):
        _panel(panel, biography, measure, layer, heads)
    for panel in panels[len(layers) :]:
        panel.axis("off")
    figure.suptitle(f"{measure} while training; most at the end: head {best}, {value:.3f}", fontsize=10, color=INK)
    figure.supxlabel("step", fontsize=8, color=FAINT)
    figure.savefig(path, dpi=160)
    return path


def _by_layer(biography: Biography) -> dict[str, list[str]]:
    layers: dict[str, list[str]] = {}
    for head in biography.addresses:
        place = Address.parse(head)
        layers.setdefault(f"{place.stack}.{place.layer}" if place.stack else str(place.layer), []).append(head)
    return layers


def _panel(panel: "Axes", biography: Biography, measure: str, layer: str, heads: list[str]) -> None:
    lives = {head: biography.of(head, measure) for head in heads}
    known = [head for head in heads if lives[head][-1] == lives[head][-1]]  # not those without a number
    named = sorted(known, key=lambda head: lives[head][-1], reverse=True)[:NAMED]
    for i, (head, life) in enumerate(lives.items()):
        number = Address.parse(head).head
        panel.plot(biography.steps, life, color=COLOURS[i % len(COLOURS)], linewidth=1.4 if head in named else 0.7,
                   linestyle=DASHES[i // len(COLOURS) % len(DASHES)], alpha=1.0 if head in named else 0.5,
                   marker="o" if len(life) == 1 else None, label=f"head {number}" if head in named else None)  # fmt: skip
    panel.set_title(f"layer {layer}", fontsize=9, color=INK, loc="left", fontweight="bold")
    panel.tick_params(labelsize=7, colors=FAINT)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    if named:
        panel.legend(fontsize=6, frameon=False, loc="best", labelcolor=INK)
