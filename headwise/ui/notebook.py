"""Plain HTML views of heads in notebooks, shown if widgets are not available, as in saved notebooks and on the web."""

from html import escape
from typing import Any

from headwise.analysis.recording.attention_maps import AttentionView
from headwise.analysis.roles.head_profile import HeadProfile
from headwise.analysis.roles.profile_result import Profile
from headwise.heads.head import Head
from headwise.ui.figures.figure_with_data import LINE_COLORS, MUTED_COLOR, TEXT_COLOR
from headwise.ui.figures.role_grid import LEVEL_ALPHA, NO_ROLE_COLOR
from headwise.ui.role_badges import role_badge, text_color

MAX_HEADS = 4  # heads drawn per sentence, those with the largest weights
LINE_HEIGHT, COLUMN_GAP = 18, 150  # pixels between words, and between the two columns of words
MIN_WEIGHT = 0.02
CELL_STYLE = "width:22px;height:20px;text-align:center;font:11px sans-serif;padding:0;border:1px solid #fff"


def profile_html(profile: Profile) -> str:
    """Return the grid of roles with a tooltip per head, and a table of the best head of each role."""
    rows = []
    for layer in profile.metadata["layers"]:
        cells = "".join(_cell(profile[head]) for head in profile.addresses if str(head.layer_address) == layer)
        rows.append(f'<tr><th style="font:11px sans-serif;color:{MUTED_COLOR}">{layer}</th>{cells}</tr>')
    lines = []
    for role, heads in profile.heads_by_role().items():
        head = profile[heads[0]]
        evidence, examples = (
            next(evidence for evidence in head.roles if evidence.role == role),
            head.examples_by_role[role],
        )
        description = f"{role} {evidence.detail}".strip() + f", {evidence.corpus_label}"
        lines.append(
            [
                str(head.address),
                description,
                evidence.evidence_label,
                _format_number(evidence.score),
                _format_number(evidence.baseline),
                examples[0].text if examples else "",
            ]
        )
    about = profile.metadata
    noun = "images" if about.get("image_grid") else "texts"
    description = f"{len(profile)} heads on {about['texts']:,} {noun}, {about['tokens']:,} tokens"
    grid = f'<table style="border-collapse:collapse">{"".join(rows)}</table>'
    columns = ["best head", "role", "evidence", "score", "baseline", "example"]
    return f"<p>{description}</p>{grid}{_html_table(columns, lines)}"


def head_matrices_html(head: Head) -> str:
    """Return the matrix sizes of a head and the singular values of its QK and OV matrices."""
    spec = head.layer.spec
    group_heads = [spec.head_ids[i] for i, kv_index in enumerate(spec.kv_of_head) if kv_index == head.kv_index]
    sizes = [[name, " × ".join(map(str, getattr(head, name).shape))] for name in ("W_Q", "W_K", "W_V", "W_O")]
    group_note = f"; keys and values shared by heads {', '.join(map(str, group_heads))}" if len(group_heads) > 1 else ""
    heading = f"<p><b>head {head.address}</b>, head_dim {spec.head_dim}{group_note}</p>"
    bars = "".join(_singular_value_bars(name, getattr(head, name).singular_values().tolist()) for name in ("QK", "OV"))
    return f"{heading}{_html_table(['matrix', 'shape'], sizes)}{bars}"


def attention_html(view: AttentionView) -> str:
    """Return drawings of words in two columns with lines between them, for at most `MAX_HEADS` heads."""
    heads = list(view.heads)
    if len(heads) > MAX_HEADS:
        heads = list(dict.fromkeys(edge.head for edge in view.top_edges(40)))[:MAX_HEADS]
    drawings = "".join(_arcs(view, head, LINE_COLORS[i % len(LINE_COLORS)]) for i, head in enumerate(heads))
    note = (
        ""
        if len(heads) == len(view.heads)
        else f"<p>{len(heads)} of {len(view.heads)} heads, those with the largest weights</p>"
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{drawings}</div>{note}'


def head_badge_style(head: HeadProfile) -> tuple[str, str, float]:
    """Return the two letters of a head, its color and the opacity for its evidence level."""
    if head.role == "unclear":
        return "", NO_ROLE_COLOR, 1.0
    return *role_badge(head.role), LEVEL_ALPHA[head.evidence_level]


def _cell(head: HeadProfile) -> str:
    letters, color, strength = head_badge_style(head)
    tooltip = f"{head.address}: {head.role_label} ({head.evidence_label})"
    if head.score is not None:
        tooltip += f", score {_format_number(head.score)}, baseline {_format_number(head.baseline)}"
    tooltip += f"; idle pattern: {', '.join(head.idle_pattern)}" if head.idle_pattern else ""
    shade = color + f"{round(255 * strength):02x}"
    ink = TEXT_COLOR if strength <= 0.7 or head.role == "unclear" else text_color(color)
    return f'<td title="{escape(tooltip)}" style="{CELL_STYLE};background:{shade};color:{ink}">{escape(letters)}</td>'


def _arcs(view: AttentionView, head: str, color: str) -> str:
    query_groups, key_groups = view.query_key_groups(head)
    left = 8 * max(map(len, query_groups.labels)) + 10
    right = 8 * max(map(len, key_groups.labels)) + 10
    parts = [f'<text x="{left}" y="12" fill="{color}" font-weight="bold">head {head}</text>']
    for i, row in enumerate(view.map(head).tolist()):
        for j, weight in enumerate(row):
            if weight >= MIN_WEIGHT:
                parts.append(
                    f'<line x1="{left + 4}" y1="{_row_y(i)}" x2="{left + COLUMN_GAP - 4}" y2="{_row_y(j)}" stroke="{color}" '
                    f'stroke-opacity="{min(1.0, weight):.2f}" stroke-width="{0.8 + 2 * weight:.1f}"/>'
                )
    for labels, x, anchor in ((query_groups.labels, left, "end"), (key_groups.labels, left + COLUMN_GAP, "start")):
        parts += [
            f'<text x="{x}" y="{_row_y(i) + 4}" text-anchor="{anchor}" fill="{TEXT_COLOR}">{escape(label)}</text>'
            for i, label in enumerate(labels)
        ]
    height = _row_y(max(len(query_groups.labels), len(key_groups.labels)))
    size = f'width="{left + COLUMN_GAP + right}" height="{height}" style="font:13px sans-serif"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'


def _row_y(index: int) -> int:
    return 28 + LINE_HEIGHT * index


def _singular_value_bars(name: str, values: list[float]) -> str:
    max_value = max(values, default=0.0) or 1.0
    bars = "".join(
        f'<rect x="{4 * i}" y="{40 - 38 * value / max_value:.1f}" width="3" '
        f'height="{38 * value / max_value:.1f}" fill="{LINE_COLORS[0]}"/>'
        for i, value in enumerate(values)
    )
    caption = f"singular values of {name}, maximum {_format_number(max_value)}"
    return f'<p style="font:11px sans-serif">{caption}<br><svg width="{4 * len(values)}" height="42">{bars}</svg></p>'


def _html_table(columns: list[str], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>" if rows else ""


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
