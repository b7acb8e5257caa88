"""Depth profile: metrics from the first layer to the last."""

from collections.abc import Sequence

import numpy as np

from headwise.analysis.metrics.offsets import OFFSET_SPECS
from headwise.analysis.metrics.row_shape import CONFIDENCE, DISTANCE, ENTROPY, FIRST_TOKEN
from headwise.analysis.metrics.variability import VARIABILITY
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import ArgumentError, suggest_names
from headwise.ui.figures.figure_with_data import (
    LINE_COLORS,
    MUTED_COLOR,
    TEXT_COLOR,
    FigureWithData,
    make_figure,
    style_axes,
)
from headwise.ui.role_badges import hue_to_hex

DEFAULT_METRICS = tuple(
    metric_spec.name for metric_spec in (ENTROPY, CONFIDENCE, DISTANCE, FIRST_TOKEN, OFFSET_SPECS[1], VARIABILITY)
)


def draw_depth(profile: Profile, metrics: Sequence[str] = DEFAULT_METRICS) -> FigureWithData:
    """Plot one panel per metric: one dot per head, and the mean of each layer."""
    for name in metrics:
        if name not in profile.accumulator.fields:
            raise ArgumentError(
                f"metrics: {name!r} was not measured, {suggest_names(name, profile.accumulator.fields)}"
            )
    layers = profile.metadata["layers"]
    layer_index = np.array([layers.index(str(address.layer_address)) for address in profile.addresses])
    columns = min(3, len(metrics))
    num_rows = -(-len(metrics) // columns)
    figure = make_figure(2.7 * columns + 0.3, 1.9 * num_rows + 0.4)
    panel_axes = list(figure.subplots(num_rows, columns, sharex=True, squeeze=False).flat)
    rows = []
    for axes, name in zip(panel_axes, metrics, strict=False):
        values, means = profile.metric(name), profile.mean_by_layer(name)
        axes.plot(layer_index, values, "o", color=MUTED_COLOR, markersize=2.6, alpha=0.6, markeredgewidth=0)
        metric_spec = profile.metric_specs[name]
        color = LINE_COLORS[0] if metric_spec.hue is None else hue_to_hex(metric_spec.hue)
        axes.plot(range(len(layers)), means, color=color, linewidth=1.5)
        axes.set_title(
            name if metric_spec.unit == "share" else f"{name}, {metric_spec.unit}",
            fontsize=9,
            color=TEXT_COLOR,
            loc="left",
        )
        axes.set_ylim(bottom=min(0.0, float(np.nanmin(values))))
        style_axes(axes)
        rows += [
            {"measure": name, "head": str(address), "layer": str(address.layer_address), "value": float(value)}
            for address, value in zip(profile.addresses, values, strict=True)
        ]
    for axes in panel_axes[len(metrics) :]:
        axes.axis("off")
    figure.supxlabel("layer", fontsize=8, color=MUTED_COLOR)
    return FigureWithData(figure, rows)
