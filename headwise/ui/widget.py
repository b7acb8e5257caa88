"""Notebook widget of profiles and attention maps. Without anywidget or a running kernel, `notebook` renders plain HTML."""

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headwise.analysis.recording.attention_maps import AttentionView
from headwise.analysis.roles.profile_result import Profile
from headwise.ui.head_summary import summary_lines
from headwise.ui.notebook import head_badge_style


def widget_mime_bundle(content: Profile | AttentionView) -> dict[str, Any]:
    """Return the MIME bundle of a widget, or an empty dict if no widget can be shown."""
    if not is_widget_available():
        return {}
    data = profile_widget_data(content) if isinstance(content, Profile) else attention_widget_data(content)
    bundle = _widget_class()(data=data)._repr_mimebundle_()
    return dict(bundle[0] if isinstance(bundle, tuple) else bundle or {})


def is_widget_available() -> bool:
    """Return whether a kernel runs and anywidget is installed."""
    return "ipykernel" in sys.modules and find_spec("anywidget") is not None


def profile_widget_data(profile: Profile) -> dict[str, Any]:
    """Return the grid of heads, with the summary of each."""
    heads = []
    for head in profile:
        letters, color, strength = head_badge_style(head)
        heads.append(
            {
                "head": str(head.address), "layer": str(head.address.layer_address), "letters": letters, "color": color,
                "strength": strength, "role": head.role_label, "evidence_level": head.evidence_level, "score": head.score,
                "baseline": head.baseline, "idle_patterns": list(head.idle_pattern),
                "summary": [line.text for line in summary_lines(profile, head)],
                "examples": [
                    [round(context.weight, 2), context.text] for context in (head.examples or head.top_contexts)[:4]
                ],
            }
        )  # fmt: skip
    return {"kind": "profile", "layers": list(profile.metadata["layers"]), "heads": heads}


def attention_widget_data(view: AttentionView) -> dict[str, Any]:
    """Return the words and the map of every head, rounded to three digits."""
    maps = {}
    for head in view.heads:
        query_groups, key_groups = view.query_key_groups(head)
        weights = [[round(weight, 3) for weight in row] for row in view.map(head).tolist()]
        maps[head] = {"queries": list(query_groups.labels), "keys": list(key_groups.labels), "weights": weights}
    top_edge = view.top_edges(1)
    return {"kind": "attention", "maps": maps, "first": top_edge[0].head if top_edge else view.heads[0]}


@cache
def _widget_class() -> Any:
    """Create the widget class on first use, because anywidget is optional."""
    import anywidget
    import traitlets

    class HeadwiseWidget(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("widget.js")
        data = traitlets.Dict().tag(sync=True)

    return HeadwiseWidget
