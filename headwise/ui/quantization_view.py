"""Weights at few bits, in the terminal and as pictures: what they take, what they cost, head by head."""

import math
from collections.abc import Mapping

from rich.console import Console

from headwise.analysis.ablation.sensitivity import Sensitivity
from headwise.compression.allocate_bits import AllocationReport
from headwise.compression.quantization_report import Judged
from headwise.errors import HeadwiseError
from headwise.spec import Address, ModelSpec
from headwise.spec.weight_bits import PAIRS
from headwise.ui.figures.figure_io import FAINT, INK, Drawing, make_figure
from headwise.ui.tables import make_table


def show_judged(judged: Judged, console: Console | None = None) -> None:
    """Print bytes by part, then losses."""
    console = console or Console()
    rows = [[f"{one:,}" if isinstance(one, int) else one for one in row] for row in judged.rows()]
    columns = ["part", "numbers", "bytes before", "bytes after", "bits a number"]
    console.print(make_table("What weights take, scales among it", columns, rows))
    if judged.more is not None:
        title = f"What it costs: loss, {judged.metric}, {judged.texts} texts, with 95 % intervals"
        console.print(make_table(title, ["", "mean", "low", "high"], judged.losses()))


def show_allocation(report: AllocationReport, console: Console | None = None) -> None:
    """Print bits shared out beside uniform bits and random mixes of equal cost."""
    pairs = ", ".join(f"{count} pairs at {bits}" for bits, count in report.counts.items())
    title = f"Bits shared out: {pairs}. Loss gained, {report.metric}, {report.texts} texts"
    columns = ["heads", "mean bits", "loss gained", "low", "high"]
    (console or Console()).print(make_table(title, columns, report.rows()))


def draw_bits(spec: ModelSpec) -> Drawing:
    """The grid of heads, coloured by the bits of what each reads by and writes with: W_Q and W_O."""
    panels: dict[str, dict[Address, float]] = {pair: {} for pair in PAIRS}
    for site in spec.sites:
        layer = spec.attention_at(site)
        for number in layer.head_ids:
            own = (32, 32) if layer.weights is None else (layer.weights.q[number], layer.weights.o[number])
            for pair, bits in zip(PAIRS, own, strict=True):
                panels[pair][site.head(number)] = float(bits)
    return draw_grids({f"bits of {pair}": shown for pair, shown in panels.items()}, "bits", ".0f")


def draw_costs(found: Sensitivity) -> Drawing:
    """The grid of heads, a panel for each part, coloured by what 4 bits cost; who shares keys shares the colour.

    Where 4 bits were not asked for, it is the fewest that were.
    """
    bits = min(one.bits for one in found.settings)
    bits = 4 if any(one.bits == 4 for one in found.settings) else bits
    panels: dict[str, dict[Address, float]] = {}
    for one, more in zip(found.settings, found.more, strict=True):
        if one.bits == bits:
            shown = panels.setdefault(f"{one.part} at {bits} bits", {})
            shown |= dict.fromkeys(map(Address.parse, one.heads), float(more))
    return draw_grids(panels, f"loss gained, {found.metric}", ".4f")


def draw_grids(panels: Mapping[str, Mapping[Address, float]], name: str, form: str = ".3g") -> Drawing:
    """Layers downwards, heads from left to right, a panel for each mapping, all with the same colours."""
    heads = {head for shown in panels.values() for head in shown}
    if not heads:
        raise HeadwiseError("there is no head to be drawn.")
    sites = sorted({head.site for head in heads}, key=lambda site: (site.stack, site.layer))
    width = 1 + max(head.head for head in heads)
    figure = make_figure(len(panels) * (0.42 * width + 1.1) + 0.8, 0.26 * len(sites) + 1.0)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    every = [value for shown in panels.values() for value in shown.values() if math.isfinite(value)]
    low, high = 0.0, max([0.0, *every]) or 1.0  # what lies below 0 is noise, and drawn as nothing
    drawn = None
    for panel, (title, shown) in zip(axes, panels.items(), strict=True):
        cells = [[shown.get(site.head(n), math.nan) for n in range(width)] for site in sites]
        drawn = panel.imshow(cells, cmap="YlOrRd", vmin=low, vmax=high, aspect="auto")
        panel.set_title(title, fontsize=9, color=INK)
        panel.set_xticks(range(width), range(width), fontsize=7)
        panel.set_yticks(range(len(sites)), list(map(str, sites)), fontsize=7)
        panel.set_xlabel("head", fontsize=8, color=INK)
        for row, values in enumerate(cells):
            for column, value in enumerate(values):
                if math.isfinite(value):
                    dark = value > low + 0.6 * (high - low)
                    colour = "#ffffff" if dark else INK
                    panel.text(column, row, f"{value:{form}}", ha="center", va="center", fontsize=5, color=colour)
        for side in panel.spines.values():
            side.set_color(FAINT)
    axes[0].set_ylabel("layer", fontsize=8, color=INK)
    bar = figure.colorbar(drawn, ax=list(axes), shrink=0.8)  # pyright: ignore[reportArgumentType]
    bar.set_label(name, fontsize=8, color=INK)
    rows = [
        {"panel": t, "head": str(head), name: value} for t, shown in panels.items() for head, value in shown.items()
    ]
    return Drawing(figure, rows)
