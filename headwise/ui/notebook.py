"""Heads in a notebook, as plain HTML: what is shown where widgets are off, in saved notebooks and on the web."""

from html import escape
from typing import Any

from headwise.analysis.recording.attention_maps import Attended
from headwise.analysis.roles.profile_result import HeadProfile, Profile
from headwise.heads.head import Head
from headwise.ui.figures.figure_io import COLOURS, FAINT, INK
from headwise.ui.figures.roles import EMPTY, STRENGTH
from headwise.ui.role_badges import letter_ink, sign

SIDE_BY_SIDE = 4  # heads of a sentence that are drawn, those with the hardest looks
LINE, COLUMN = 18, 150  # pixels: from word to word, and between the two columns of words
FAINTEST = 0.02
CELL = "width:22px;height:20px;text-align:center;font:11px sans-serif;padding:0;border:1px solid #fff"


def profile_html(profile: Profile) -> str:
    """The grid of roles, a cell for each head with its story behind the pointer; then the strongest head of each role."""
    rows = []
    for layer in profile.about["layers"]:
        cells = "".join(_cell(profile[head]) for head in profile.addresses if str(head.site) == layer)
        rows.append(f'<tr><th style="font:11px sans-serif;color:{FAINT}">{layer}</th>{cells}</tr>')
    lines = []
    for role, heads in profile.roles().items():
        head = profile[heads[0]]
        one, cases = next(one for one in head.roles if one.role == role), head.cases[role]
        told = f"{role} {one.detail}".strip() + f", {one.on}"
        lines.append(
            [
                str(head.address),
                told,
                one.evidence_level,
                _number(one.score),
                _number(one.null),
                cases[0].text if cases else "",
            ]
        )
    about = profile.about
    what = "pictures" if about.get("pictures") else "texts"
    told = f"{len(profile)} heads on {about['texts']:,} {what}, {about['tokens']:,} tokens"
    grid = f'<table style="border-collapse:collapse">{"".join(rows)}</table>'
    return f"<p>{told}</p>{grid}{_table(['best', 'role', 'rung', 'score', 'baseline', 'a case of it'], lines)}"


def head_html(head: Head) -> str:
    """Its matrices and how many directions they use."""
    spec = head.layer.spec
    shared = [spec.head_ids[i] for i, kv in enumerate(spec.kv_of_head) if kv == head.kv_index]
    sizes = [[name, " × ".join(map(str, getattr(head, name).shape))] for name in ("W_Q", "W_K", "W_V", "W_O")]
    group = f"; keys and values shared by heads {', '.join(map(str, shared))}" if len(shared) > 1 else ""
    told = f"<p><b>head {head.address}</b>, size {spec.head_dim}{group}</p>"
    bars = "".join(_bars(name, getattr(head, name).singular_values().tolist()) for name in ("QK", "OV"))
    return f"{told}{_table(['matrix', 'size'], sizes)}{bars}"


def attended_html(attended: Attended) -> str:
    """Words in two columns and lines between them: the heads whose looks are hardest, or all of a few."""
    heads = list(attended.heads)
    if len(heads) > SIDE_BY_SIDE:
        heads = list(dict.fromkeys(look.head for look in attended.strongest(40)))[:SIDE_BY_SIDE]
    drawn = "".join(_arcs(attended, head, COLOURS[i % len(COLOURS)]) for i, head in enumerate(heads))
    more = "" if len(heads) == len(attended.heads) else f"<p>{len(heads)} of {len(attended.heads)} heads</p>"
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{drawn}</div>{more}'


def look_of(head: HeadProfile) -> tuple[str, str, float]:
    """A head's two letters, its colour and how strong that is."""
    if head.role == "unclear":
        return "", EMPTY, 1.0
    return *sign(head.role), STRENGTH[head.rung]


def _cell(head: HeadProfile) -> str:
    letters, colour, strength = look_of(head)
    told = f"{head.address}: {head.role_label} ({head.evidence_level})"
    if head.score is not None:
        told += f", {_number(head.score)} against {_number(head.null)}"
    told += f"; rests: {', '.join(head.rest)}" if head.rest else ""
    shade = colour + f"{round(255 * strength):02x}"
    ink = INK if strength <= 0.7 or head.role == "unclear" else letter_ink(colour)
    return f'<td title="{escape(told)}" style="{CELL};background:{shade};color:{ink}">{letters}</td>'


def _arcs(attended: Attended, head: str, colour: str) -> str:
    looking, seen = attended.sides(head)
    left = 8 * max(map(len, looking.labels)) + 10
    right = 8 * max(map(len, seen.labels)) + 10
    parts = [f'<text x="{left}" y="12" fill="{colour}" font-weight="bold">head {head}</text>']
    for i, row in enumerate(attended.map(head).tolist()):
        for j, weight in enumerate(row):
            if weight >= FAINTEST:
                parts.append(f'<line x1="{left + 4}" y1="{_y(i)}" x2="{left + COLUMN - 4}" y2="{_y(j)}" stroke="{colour}" '
                             f'stroke-opacity="{min(1.0, weight):.2f}" stroke-width="{0.8 + 2 * weight:.1f}"/>')  # fmt: skip
    for labels, x, anchor in ((looking.labels, left, "end"), (seen.labels, left + COLUMN, "start")):
        parts += [
            f'<text x="{x}" y="{_y(i) + 4}" text-anchor="{anchor}" fill="{INK}">{escape(label)}</text>'
            for i, label in enumerate(labels)
        ]
    tall = _y(max(len(looking.labels), len(seen.labels)))
    size = f'width="{left + COLUMN + right}" height="{tall}" style="font:13px sans-serif"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'


def _y(place: int) -> int:
    return 28 + LINE * place


def _bars(name: str, values: list[float]) -> str:
    most = max(values, default=0.0) or 1.0
    bars = "".join(
        f'<rect x="{4 * i}" y="{40 - 38 * value / most:.1f}" width="3" height="{38 * value / most:.1f}" fill="{COLOURS[0]}"/>'
        for i, value in enumerate(values)
    )
    told = f"singular values of {name}, {_number(most)} at most"
    return f'<p style="font:11px sans-serif">{told}<br><svg width="{4 * len(values)}" height="42">{bars}</svg></p>'


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>" if rows else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
