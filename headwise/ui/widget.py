"""Heads in a live notebook: a widget, where anywidget is there and a kernel runs; elsewhere `notebook` shows plain HTML."""

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.analysis.recording.attention_maps import Attended
from headwise.analysis.roles.profile_result import Profile
from headwise.ui.head_summary import story
from headwise.ui.notebook import look_of


def widget_bundle(shown: Profile | Attended) -> dict[str, Any]:
    """What a notebook needs to show a widget, by kind of content; empty where there can be none."""
    if not can_widget():
        return {}
    data = profile_data(shown) if isinstance(shown, Profile) else attended_data(shown)
    made = _kind()(data=data)._repr_mimebundle_()
    return dict(made[0] if isinstance(made, tuple) else made or {})


def can_widget() -> bool:
    """Whether somebody could press on it: a kernel runs, and anywidget is installed."""
    return "ipykernel" in sys.modules and find_spec("anywidget") is not None


def profile_data(profile: Profile) -> dict[str, Any]:
    """The grid, and behind every head its story."""
    heads = []
    for head in profile:
        letters, colour, strength = look_of(head)
        heads.append(
            {
                "head": str(head.address), "layer": str(head.address.site), "letters": letters, "colour": colour,
                "strength": strength, "role": head.role_label, "rung": head.rung, "score": head.score,
                "null": head.null, "rest": list(head.rest), "story": [line.text for line in story(profile, head)],
                "evidence": [[round(seen.weight, 2), seen.text] for seen in (head.evidence or head.hardest)[:4]],
            }
        )  # fmt: skip
    return {"kind": "profile", "layers": list(profile.about["layers"]), "heads": heads}


def attended_data(attended: Attended) -> dict[str, Any]:
    """Words and every head's map, three digits each."""
    maps = {}
    for head in attended.heads:
        looking, seen = attended.sides(head)
        weights = [[round(weight, 3) for weight in row] for row in attended.map(head).tolist()]
        maps[head] = {"looking": list(looking.labels), "seen": list(seen.labels), "weights": weights}
    first = attended.strongest(1)
    return {"kind": "attended", "maps": maps, "first": first[0].head if first else attended.heads[0]}


@cache
def _kind() -> Any:
    """The widget's class: made when first asked for, since anywidget may not be there."""
    import anywidget
    import traitlets

    class HeadwiseWidget(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("widget.js")
        data = traitlets.Dict().tag(sync=True)

    return HeadwiseWidget
