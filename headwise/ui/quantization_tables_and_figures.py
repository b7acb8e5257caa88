"""Terminal tables and figures of quantized weights: memory and cost in loss per head."""

import math
from collections.abc import Mapping

from rich.console import Console

from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult
from headwise.compression.allocate_bits import BitAllocationReport
from headwise.compression.quantized_size_and_loss import QuantizationReport
from headwise.errors import ArgumentError
from headwise.spec import Address, ModelSpec
from headwise.spec.weight_bits import PROJECTION_PAIRS
from headwise.ui.figures.figure_with_data import MUTED_COLOR, TEXT_COLOR, FigureWithData, make_figure
from headwise.ui.terminal_table import make_table


def show_quantization(report: QuantizationReport, console: Console | None = None) -> None:
    """Print the bytes of each part, then the losses."""
    console = console or Console()
    rows = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in report.footprint_rows()]
    columns = ["part", "weights", "bytes before", "bytes after", "bits per weight"]
    console.print(make_table("Memory of the weights, including scales", columns, rows))
    if report.loss_increase is not None:
        title = f"Loss ({report.metric}) on {report.texts} texts, with 95% CI"
        console.print(make_table(title, ["", "mean", "low", "high"], report.loss_rows()))


def show_allocation_losses(report: BitAllocationReport, console: Console | None = None) -> None:
    """Print the loss of the bit allocation, of uniform bits and of random allocations of equal size."""
    pairs = ", ".join(f"{count} pairs at {bits}" for bits, count in report.counts.items())
    title = f"Bit allocation: {pairs} bits. Loss increase ({report.metric}) on {report.texts} texts, with 95% CI"
    columns = ["allocation", "mean bits", "loss increase", "low", "high"]
    (console or Console()).print(make_table(title, columns, report.loss_rows()))


def draw_bits(spec: ModelSpec) -> FigureWithData:
    """Draw the grid of heads, colored by the bits of W_Q and of W_O."""
    grids: dict[str, dict[Address, float]] = {pair: {} for pair in PROJECTION_PAIRS}
    for layer_address in spec.layer_addresses:
        layer = spec.attention_at(layer_address)
        for head_id in layer.head_ids:
            head_bits = (
                (32, 32) if layer.weight_bits is None else (layer.weight_bits.q[head_id], layer.weight_bits.o[head_id])
            )
            for pair, bits in zip(PROJECTION_PAIRS, head_bits, strict=True):
                grids[pair][layer_address.head_address(head_id)] = float(bits)
    return draw_grids({f"bits of {pair}": values for pair, values in grids.items()}, "bits", ".0f")


def draw_quantization_costs(sensitivity: SensitivityResult) -> FigureWithData:
    """Draw the grid of heads, one panel per part, colored by the loss increase at 4 bits.

    If 4 bits were not measured, use the fewest bits. Heads that share a KV head have the same color.
    """
    bits = min(setting.bits for setting in sensitivity.targets)
    bits = 4 if any(setting.bits == 4 for setting in sensitivity.targets) else bits
    grids: dict[str, dict[Address, float]] = {}
    for setting, loss_increase in zip(sensitivity.targets, sensitivity.loss_increase, strict=True):
        if setting.bits == bits:
            values = grids.setdefault(f"{setting.part} at {bits} bits", {})
            values |= dict.fromkeys(map(Address.parse, setting.heads), float(loss_increase))
    return draw_grids(grids, f"loss increase, {sensitivity.metric}", ".4f")


def draw_grids(grids: Mapping[str, Mapping[Address, float]], name: str, number_format: str = ".3g") -> FigureWithData:
    """Draw one panel per mapping, with layers as rows, heads as columns and a common color scale."""
    heads = {head for grid in grids.values() for head in grid}
    if not heads:
        raise ArgumentError("grids: no heads to draw. Got empty mappings. Give at least one head.")
    layer_addresses = sorted(
        {head.layer_address for head in heads}, key=lambda layer_address: (layer_address.stack, layer_address.layer)
    )
    width = 1 + max(head.head for head in heads)
    figure = make_figure(len(grids) * (0.42 * width + 1.1) + 0.8, 0.26 * len(layer_addresses) + 1.0)
    all_axes = figure.subplots(1, len(grids), squeeze=False)[0]
    finite_values = [value for grid in grids.values() for value in grid.values() if math.isfinite(value)]
    low, high = 0.0, max([0.0, *finite_values]) or 1.0  # values below 0 are noise and drawn as 0
    image = None
    for axes, (title, grid) in zip(all_axes, grids.items(), strict=True):
        cells = [
            [grid.get(layer_address.head_address(n), math.nan) for n in range(width)]
            for layer_address in layer_addresses
        ]
        image = axes.imshow(cells, cmap="YlOrRd", vmin=low, vmax=high, aspect="auto")
        axes.set_title(title, fontsize=9, color=TEXT_COLOR)
        axes.set_xticks(range(width), range(width), fontsize=7)
        axes.set_yticks(range(len(layer_addresses)), list(map(str, layer_addresses)), fontsize=7)
        axes.set_xlabel("head", fontsize=8, color=TEXT_COLOR)
        for row, values in enumerate(cells):
            for column, value in enumerate(values):
                if math.isfinite(value):
                    is_dark = value > low + 0.6 * (high - low)
                    color = "#ffffff" if is_dark else TEXT_COLOR
                    axes.text(
                        column, row, f"{value:{number_format}}", ha="center", va="center", fontsize=5, color=color
                    )
        for side in axes.spines.values():
            side.set_color(MUTED_COLOR)
    all_axes[0].set_ylabel("layer", fontsize=8, color=TEXT_COLOR)
    colorbar = figure.colorbar(image, ax=list(all_axes), shrink=0.8)  # pyright: ignore[reportArgumentType]
    colorbar.set_label(name, fontsize=8, color=TEXT_COLOR)
    rows = [
        {"panel": grid_title, "head": str(head), name: value}
        for grid_title, grid in grids.items()
        for head, value in grid.items()
    ]
    return FigureWithData(figure, rows)
