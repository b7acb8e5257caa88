"""The depth profile: how measures go from the first layer to the last."""

from collections.abc import Sequence

import numpy as np

from headwise.analysis.metrics.offsets import OFFSET
from headwise.analysis.metrics.row_shape import CONFIDENCE, DISTANCE, ENTROPY, RESTING
from headwise.analysis.metrics.variability import VARIABILITY
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import HeadwiseError, close_names
from headwise.ui.figures.figure_io import COLOURS, FAINT, INK, Drawing, make_figure, tidy
from headwise.ui.role_badges import coloured

USUAL = tuple(number.name for number in (ENTROPY, CONFIDENCE, DISTANCE, RESTING, OFFSET[1], VARIABILITY))


def draw_depth(profile: Profile, measures: Sequence[str] = USUAL) -> Drawing:
    """A panel for each measure: a dot for each head, a line through the means of layers."""
    for name in measures:
        if name not in profile.tally.fields:
            raise HeadwiseError(f"{name!r} was not measured; {close_names(name, profile.tally.fields)}")
    layers = profile.about["layers"]
    place = np.array([layers.index(str(address.site)) for address in profile.addresses])
    columns = min(3, len(measures))
    down = -(-len(measures) // columns)
    figure = make_figure(2.7 * columns + 0.3, 1.9 * down + 0.4)
    panels = list(figure.subplots(down, columns, sharex=True, squeeze=False).flat)
    rows = []
    for panel, name in zip(panels, measures, strict=False):
        values, means = profile.measure(name), profile.by_layer(name)
        panel.plot(place, values, "o", color=FAINT, markersize=2.6, alpha=0.6, markeredgewidth=0)
        told = profile.numbers[name]
        colour = COLOURS[0] if told.hue is None else coloured(told.hue)
        panel.plot(range(len(layers)), means, color=colour, linewidth=1.5)
        panel.set_title(name if told.unit == "share" else f"{name}, {told.unit}", fontsize=9, color=INK, loc="left")
        panel.set_ylim(bottom=min(0.0, float(np.nanmin(values))))
        tidy(panel)
        rows += [
            {"measure": name, "head": str(address), "layer": str(address.site), "value": float(value)}
            for address, value in zip(profile.addresses, values, strict=True)
        ]
    for panel in panels[len(measures) :]:
        panel.axis("off")
    figure.supxlabel("layer", fontsize=8, color=FAINT)
    return Drawing(figure, rows)
