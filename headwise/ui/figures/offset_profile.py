"""Offset profiles: mean attention of heads by distance."""

import numpy as np

from headwise.analysis.metrics.offsets import OFFSET_SPECS
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import ArgumentError
from headwise.heads.head import HeadPattern
from headwise.spec import Address, select
from headwise.ui.figures.figure_with_data import (
    LINE_COLORS,
    MUTED_COLOR,
    TEXT_COLOR,
    FigureWithData,
    make_figure,
    style_axes,
)

MAX_HEADS = 12  # heads per figure
MAX_OFFSET = 16  # tokens in either direction
DEFAULT_HEADS = 6  # number of heads if none are given


def draw_offsets(profile: Profile, heads: HeadPattern | None = None) -> FigureWithData:
    """Plot the mean attention by distance, one panel per head. None plots the six heads with the strongest single offset."""
    selected = _most_focused_heads(profile) if heads is None else select(heads, profile.addresses)
    if len(selected) > MAX_HEADS:
        raise ArgumentError(
            f"heads: a figure shows at most {MAX_HEADS}. Got {len(selected)}. Name fewer, for example {selected[0]!s}."
        )
    offsets = _measured_offsets(profile)
    columns = min(3, len(selected))
    num_rows = -(-len(selected) // columns)
    figure = make_figure(2.6 * columns + 0.4, 1.5 * num_rows + 0.5)
    panel_axes = list(figure.subplots(num_rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    rows = []
    for axes, address in zip(panel_axes, selected, strict=False):
        head_profile = profile[address]
        weights = [head_profile.metrics[OFFSET_SPECS[offset].name] for offset in offsets]
        axes.bar([-offset for offset in offsets], weights, width=0.85, color=LINE_COLORS[0])
        axes.set_title(
            f"head {address}: {head_profile.role} {head_profile.detail}".strip(),
            fontsize=8,
            color=TEXT_COLOR,
            loc="left",
        )
        axes.set_ylim(0, 1)
        style_axes(axes)
        rows += [
            {"head": str(address), "role": head_profile.role, "offset": -offset, "weight": weight}
            for offset, weight in zip(offsets, weights, strict=True)
        ]
    for axes in panel_axes[len(selected) :]:
        axes.axis("off")
    figure.supxlabel("offset from the query in tokens; −1 is the previous token", fontsize=8, color=MUTED_COLOR)
    figure.supylabel("mean attention weight", fontsize=8, color=MUTED_COLOR)
    return FigureWithData(figure, rows)


def _measured_offsets(profile: Profile) -> list[int]:
    """Return the measured offsets, the farthest back first. A decoder has no negative ones."""
    measured = [
        offset
        for offset in range(MAX_OFFSET, -MAX_OFFSET - 1, -1)
        if OFFSET_SPECS[offset].name in profile.accumulator.fields
    ]
    return [
        offset
        for offset in measured
        if offset >= 0 or np.nan_to_num(profile.metric(OFFSET_SPECS[offset].name)).max() > 0
    ]


def _most_focused_heads(profile: Profile) -> tuple[Address, ...]:
    """Return the heads with the largest weight at a single offset, sorted by address."""
    weights = [profile.metric(OFFSET_SPECS[offset].name) for offset in _measured_offsets(profile)]
    max_weights = np.nan_to_num(np.stack(weights)).max(0)  # (heads,); cross-attention has no distances
    return tuple(profile.addresses[i] for i in sorted(np.argsort(-max_weights, kind="stable")[:DEFAULT_HEADS]))
