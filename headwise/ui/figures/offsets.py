"""Offset profiles: how much heads attend so many tokens back, or ahead."""

import numpy as np

from headwise.analysis.metrics.offsets import OFFSET
from headwise.analysis.roles.profile_result import Profile
from headwise.errors import HeadwiseError
from headwise.heads.head import Pattern
from headwise.spec import Address, select
from headwise.ui.figures.figure_io import COLOURS, FAINT, INK, Drawing, make_figure, tidy

MOST = 12  # heads in one picture
SHOWN = 16  # tokens back and ahead
CHOSEN = 6  # heads, where none are named


def draw_offsets(profile: Profile, heads: Pattern | None = None) -> Drawing:
    """A panel for each head: the weight at each distance, and its role. None: the six that keep most to one distance."""
    chosen = _sharpest(profile) if heads is None else select(heads, profile.addresses)
    if len(chosen) > MOST:
        raise HeadwiseError(
            f"{len(chosen)} heads do not fit into one picture; name at most {MOST}, e.g. {chosen[0]!s}."
        )
    offsets = _offsets(profile)
    columns = min(3, len(chosen))
    down = -(-len(chosen) // columns)
    figure = make_figure(2.6 * columns + 0.4, 1.5 * down + 0.5)
    panels = list(figure.subplots(down, columns, sharex=True, sharey=True, squeeze=False).flat)
    rows = []
    for panel, address in zip(panels, chosen, strict=False):
        told = profile[address]
        weights = [told.measures[OFFSET[offset].name] for offset in offsets]
        panel.bar([-offset for offset in offsets], weights, width=0.85, color=COLOURS[0])
        panel.set_title(f"head {address}: {told.role} {told.detail}".strip(), fontsize=8, color=INK, loc="left")
        panel.set_ylim(0, 1)
        tidy(panel)
        rows += [
            {"head": str(address), "role": told.role, "offset": -offset, "weight": weight}
            for offset, weight in zip(offsets, weights, strict=True)
        ]
    for panel in panels[len(chosen) :]:
        panel.axis("off")
    figure.supxlabel("tokens from the one that looks; −1 is the one before", fontsize=8, color=FAINT)
    figure.supylabel("mean attention weight", fontsize=8, color=FAINT)
    return Drawing(figure, rows)


def _offsets(profile: Profile) -> list[int]:
    """The distances measured, far behind first; a decoder never looks ahead."""
    there = [offset for offset in range(SHOWN, -SHOWN - 1, -1) if OFFSET[offset].name in profile.tally.fields]
    return [offset for offset in there if offset >= 0 or np.nan_to_num(profile.measure(OFFSET[offset].name)).max() > 0]


def _sharpest(profile: Profile) -> tuple[Address, ...]:
    """The heads with most weight at one distance, in the order of their addresses."""
    weights = [profile.measure(OFFSET[offset].name) for offset in _offsets(profile)]
    most = np.nan_to_num(np.stack(weights)).max(0)  # (heads,); cross-attention has no distances
    return tuple(profile.addresses[i] for i in sorted(np.argsort(-most, kind="stable")[:CHOSEN]))
