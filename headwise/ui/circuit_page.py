"""Page of a circuit: one self-contained HTML file with the graph by layers. All text is escaped."""

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.io.atomic_write import write_atomic
from headwise.ui.circuit_layout import (
    OUTPUT,
    CircuitLayout,
    NodePosition,
    drawn_edges,
    largest_effect,
    names_input,
    place_nodes,
)
from headwise.ui.circuit_text import curve_area_table, faithfulness_by_ablation_table, ranking_check_text, summary_rows

if TYPE_CHECKING:
    from headwise.analysis.circuits.circuit_result import CircuitResult, EdgeEffect, FaithfulnessCurve
    from headwise.ui.terminal_table import TextTable

COLUMN, ROW, LEFT, TOP = 74, 50, 96, 26  # pixels between nodes, and margins
NODE_WIDTH, NODE_HEIGHT, MAX_EDGE_WIDTH = 58, 22, 9.0
CURVE_WIDTH, CURVE_HEIGHT, CURVE_MARGIN = 460, 220, 36
FIRST_EDGES = 40  # edges shown at first
MAX_EXAMPLES = 40  # judged prompts listed
LINE_CLASSES = {"resample": "c0", "mean": "c1", "zero": "c2"}
STYLE = """
.hw-circuit { --paper: #ffffff; --ground: #f5f6f8; --text: #1b2230; --soft: #5a6474; --line: #d6dae1; --up: #2459b3;
  --down: #b3261e; --kv: #2f7a46; --mlp: #7d4695; --mean: #c2571a; --focus: #d9480f; color: var(--text);
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; background: var(--ground); padding: 16px; }
@media (prefers-color-scheme: dark) { .hw-circuit { --paper: #181c24; --ground: #10131a; --text: #e6e9ef; --soft: #a0a9b8;
  --line: #343b48; --up: #5f93e6; --down: #ff8a80; --kv: #4fa468; --mlp: #a96fc4; --mean: #ffa94d; } }
.hw-circuit * { box-sizing: border-box; }
.hw-circuit h1 { font-size: 19px; margin: 0 0 8px; } .hw-circuit h2 { font-size: 16px; margin: 0 0 8px; }
.hw-circuit section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px;
  margin: 0 auto 12px; max-width: 1180px; overflow-x: auto; }
.hw-circuit .split { display: grid; grid-template-columns: minmax(0, 1fr) 320px; gap: 14px; align-items: start; }
@media (max-width: 860px) { .hw-circuit .split { grid-template-columns: minmax(0, 1fr); } }
.hw-circuit .graph { overflow-x: auto; } .hw-circuit .soft { color: var(--soft); font-size: 13px; margin: 0 0 8px; }
.hw-circuit .panel { position: sticky; top: 8px; border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px;
  min-height: 150px; overflow-wrap: anywhere; }
.hw-circuit .panel h3 { margin: 0 0 6px; font-size: 15px; } .hw-circuit .panel p { margin: 0 0 6px; }
.hw-circuit dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 1px 12px; margin: 0; }
.hw-circuit dt { color: var(--soft); } .hw-circuit dd { margin: 0; overflow-wrap: anywhere; }
.hw-circuit svg { display: block; } .hw-circuit svg text { fill: var(--text); font-size: 12px; }
.hw-circuit .node rect { fill: var(--up); } .hw-circuit .node.kv rect { fill: var(--kv); }
.hw-circuit .node.mlp rect { fill: var(--mlp); }
.hw-circuit .node.embedding rect, .hw-circuit .node.logits rect { fill: var(--soft); }
.hw-circuit .node text { fill: #fff; text-anchor: middle; } .hw-circuit .node { cursor: default; }
.hw-circuit .node:focus { outline: none; } .hw-circuit .node:focus rect { stroke: var(--focus); stroke-width: 3; }
.hw-circuit .edge { fill: none; stroke: var(--up); opacity: 0.55; } .hw-circuit .edge.down { stroke: var(--down); }
.hw-circuit .edge:hover { opacity: 1; } .hw-circuit svg.lit .edge { opacity: 0.1; }
.hw-circuit svg.lit .edge.on { opacity: 0.95; }
.hw-circuit .row-label { text-anchor: end; } .hw-circuit svg .row-label, .hw-circuit svg .tick { fill: var(--soft);
  font-size: 11px; }
.hw-circuit .axis { stroke: var(--line); } .hw-circuit .c0 { stroke: var(--up); } .hw-circuit .c1 { stroke: var(--mean); }
.hw-circuit .c2 { stroke: var(--kv); } .hw-circuit .curve { fill: none; stroke-width: 2; }
.hw-circuit .band { stroke: none; fill: var(--up); opacity: 0.15; } .hw-circuit .sets { stroke: var(--soft);
  stroke-width: 6; opacity: 0.6; }
.hw-circuit table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin-bottom: 10px; }
.hw-circuit th, .hw-circuit td { text-align: left; padding: 2px 12px 2px 0; border-bottom: 1px solid var(--line);
  white-space: pre-wrap; }
.hw-circuit label { font-size: 13px; color: var(--soft); } .hw-circuit caption { text-align: left; color: var(--soft);
  padding-bottom: 4px; }
"""
SCRIPT = """
(() => {
  const root = document.currentScript.parentElement;
  const svg = root.querySelector("svg.graph-svg"), panel = root.querySelector(".panel");
  const facts = JSON.parse(root.querySelector("script[type='application/json']").textContent);
  const edges = [...svg.querySelectorAll(".edge")], nodes = [...svg.querySelectorAll(".node")];
  const show = (key) => {
    const fact = facts[key];
    panel.replaceChildren();
    const title = panel.appendChild(document.createElement("h3"));
    title.textContent = fact.title;
    const list = panel.appendChild(document.createElement("dl"));
    for (const [name, value] of fact.rows) {
      list.appendChild(document.createElement("dt")).textContent = name;
      list.appendChild(document.createElement("dd")).textContent = value;
    }
  };
  const light = (test) => {
    svg.classList.toggle("lit", test !== null);
    for (const edge of edges) edge.classList.toggle("on", test !== null && test(edge.dataset));
  };
  for (const node of nodes) {
    const name = node.dataset.node;
    const enter = () => { show("node " + name); light((edge) => edge.from === name || edge.to === name); };
    node.addEventListener("mouseenter", enter);
    node.addEventListener("focus", enter);
    node.addEventListener("mouseleave", () => light(null));
    node.addEventListener("blur", () => light(null));
  }
  for (const edge of edges) edge.addEventListener("mouseenter", () => show("edge " + edge.dataset.rank));
  const slider = root.querySelector("input[type='range']"), count = root.querySelector("output");
  const limit = () => {
    count.textContent = slider.value;
    for (const edge of edges) edge.style.display = Number(edge.dataset.rank) < Number(slider.value) ? "" : "none";
  };
  if (slider) { slider.addEventListener("input", limit); limit(); }
  document.documentElement.dataset.ready = "";
})();
"""


def write_circuit_page(result: "CircuitResult", path: str | Path) -> Path:
    """Write the page of a circuit, atomically."""
    facts = json.dumps(_panel_texts(result)).replace("<", "\\u003c")
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>Circuit: {escape(result.settings.task)}</title>\n"
        '<link rel="icon" href="data:,">\n<style>body { margin: 0; }</style>\n</head>\n<body>\n<div>\n'
        f'{circuit_html(result)}\n<script type="application/json">{facts}</script>\n<script>{SCRIPT}</script>\n</div>\n'
        "</body>\n</html>\n"
    )
    return write_atomic(path, page.encode())


def circuit_html(result: "CircuitResult") -> str:
    """Return the content of the page, for the file and for notebooks. Without the script, numbers are shown as tooltips."""
    parts = [_summary(result), _graph(result), _curves(result), _members(result), _examples(result)]
    return f'<style>{STYLE}</style>\n<main class="hw-circuit">\n{"".join(parts)}</main>'


def _summary(result: "CircuitResult") -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in summary_rows(result) if name)
    title = next(value for name, value in summary_rows(result) if not name)
    lines = [ranking_check_text(result), *(f"Note: {note}" for note in result.notes)]
    notes = "".join(f'<p class="soft">{escape(line)}</p>' for line in lines if line)
    return f"<section><h1>{escape(title)}</h1><dl>{rows}</dl>{notes}</section>\n"


def _graph(result: "CircuitResult") -> str:
    layout, edges = place_nodes(result), drawn_edges(result)
    width, height = LEFT + layout.columns * COLUMN + 10, TOP + len(layout.rows) * ROW
    labels = "".join(
        f'<text class="row-label" x="{LEFT - 14}" y="{_y(row, layout) + 4}">{escape(label)}</text>'
        for row, label in enumerate(layout.rows)
    )
    largest = largest_effect(edges)
    lines = [
        _edge(rank, edge, layout.nodes[sender], layout.nodes[receiver], (layout, largest))
        for rank, (sender, receiver, edge) in enumerate(edges)
    ]
    nodes = "".join(_node(result, item, layout) for item in layout.nodes.values())
    image = (
        f'<svg class="graph-svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="group" '
        f'aria-label="Members by layer">{labels}{"".join(reversed(lines))}{nodes}</svg>'
    )
    hint = "Hover over a node or an edge, or move with Tab."
    panel = f'<aside class="panel" aria-live="polite"><p class="soft">{hint}</p></aside>'
    return (
        f'<section><h2>Graph</h2><p class="soft">{escape(_graph_note(result, len(edges)))}</p>{_slider(len(edges))}'
        f'<div class="split"><div class="graph">{image}</div>{panel}</div></section>\n'
    )


def _graph_note(result: "CircuitResult", num_edges: int) -> str:
    members = "Embedding at the bottom, logits at the top. Blue: query heads, green: KV heads, violet: MLPs."
    if not result.edges:
        return f"{members} Edges were not measured. Pass edges=20, or --edges 20."
    senders = {edge.sender for edge in result.edges}
    return (
        f"{members} Width of an edge: size of its effect by exact path patching in the full model (blue: helps, red: hurts). "
        f"{num_edges} of {len(result.edges)} edges between {len(senders)} members have an interval that excludes 0."
    )


def _slider(num_edges: int) -> str:
    if not num_edges:
        return ""
    start = min(num_edges, FIRST_EDGES)
    return (
        f'<label>Largest edges <input type="range" min="0" max="{num_edges}" value="{start}"> '
        f"<output>{start}</output></label>"
    )


def _x(column: int) -> float:
    return LEFT + column * COLUMN + NODE_WIDTH / 2


def _y(row: int, layout: CircuitLayout) -> float:
    return TOP + (len(layout.rows) - 1 - row) * ROW


def _edge(
    rank: int, edge: "EdgeEffect", start: NodePosition, end: NodePosition, drawing: tuple[CircuitLayout, float]
) -> str:
    """Return a curve from the top of the sender to the bottom of the receiver. It bows if both are in one column."""
    layout, largest = drawing
    x1, y1 = _x(start.column), _y(start.row, layout) - NODE_HEIGHT / 2
    x2, y2 = _x(end.column), _y(end.row, layout) + NODE_HEIGHT / 2
    bend = max(14.0, (y1 - y2) / 2)
    side = 0.0 if start.column != end.column or end.row - start.row == 1 else (30 + rank % 3 * 6) * (-1) ** rank
    width = max(0.8, MAX_EDGE_WIDTH * abs(edge.effect.value) / largest)
    direction = " down" if edge.effect.value < 0 else ""
    title = f"{edge.sender} → {edge.receiver}: {edge.effect}"
    return (
        f'<path class="edge{direction}" data-rank="{rank}" data-from="{start.node}" data-to="{end.node}" '
        f'stroke-width="{width:.2f}" d="M{x1:.1f},{y1:.1f} C{x1 + side:.1f},{y1 - bend:.1f} {x2 + side:.1f},{y2 + bend:.1f} '
        f'{x2:.1f},{y2:.1f}"><title>{escape(title)}</title></path>'
    )


def _node(result: "CircuitResult", item: NodePosition, layout: CircuitLayout) -> str:
    x, y = _x(item.column), _y(item.row, layout)
    title = "; ".join(f"{name} {value}" for name, value in _node_rows(result, item.node)) or item.node
    label = "embed" if item.kind == "embedding" else item.node
    return (
        f'<g class="node {item.kind}" tabindex="0" role="img" aria-label="{escape(f"{item.node}: {title}")}" '
        f'data-node="{item.node}"><rect x="{x - NODE_WIDTH / 2:.1f}" y="{y - NODE_HEIGHT / 2:.1f}" width="{NODE_WIDTH}" '
        f'height="{NODE_HEIGHT}" rx="5"></rect><text x="{x:.1f}" y="{y + 4:.1f}">{escape(label)}</text>'
        f"<title>{escape(title)}</title></g>"
    )


def _node_rows(result: "CircuitResult", node: str) -> list[tuple[str, str]]:
    """Return the numbers and the example of a node."""
    score = next((item for item in result.scores if item.node == node), None)
    if score is None:
        return [("metric of the model", f"{result.clean_metric:.2f}")]
    rows = [("kind", score.kind), (f"score, {result.settings.ranking}", f"{score.score:+.3f}")]
    drop = next((item.drop for item in result.circuit.drops if item.node == node), None)
    if drop is not None:
        rows.append(("drop of F without it", str(drop)))
    if math.isfinite(score.stability):
        rows.append(("in bootstrap discoveries", f"{score.stability:.0%}"))
    if score.example:
        rows += [("largest effect", f"{score.example_effect:+.2f}"), ("on the prompt", score.example)]
    return rows


def _panel_texts(result: "CircuitResult") -> dict[str, Any]:
    """Return the texts of the panel, by node and by edge."""
    facts: dict[str, Any] = {
        f"node {node}": {"title": node, "rows": _node_rows(result, node)} for node in (*result.circuit.nodes, OUTPUT)
    }
    for rank, (_, _, edge) in enumerate(drawn_edges(result)):
        rows = [("effect", str(edge.effect))]
        if names_input(edge):
            rows.append(("read as", names_input(edge)))
        if edge.example:
            rows += [("largest effect", f"{edge.example_effect:+.2f}"), ("on the prompt", edge.example)]
        facts[f"edge {rank}"] = {"title": f"{edge.sender} → {edge.receiver}", "rows": rows}
    return facts


def _curves(result: "CircuitResult") -> str:
    if not result.curves:
        return ""
    largest = max(point.size for curve in result.curves for point in curve.points)

    def x(size: float) -> float:
        return CURVE_MARGIN + math.log(max(size, 1)) / max(1e-9, math.log(largest)) * (CURVE_WIDTH - CURVE_MARGIN - 10)

    def y(value: float) -> float:
        inside = min(1.4, max(-0.4, 0.0 if math.isnan(value) else value))
        return 10 + (1.4 - inside) / 1.8 * (CURVE_HEIGHT - 36)

    ticks = "".join(
        f'<line class="axis" x1="{CURVE_MARGIN}" x2="{CURVE_WIDTH - 10}" y1="{y(v):.1f}" y2="{y(v):.1f}"></line>'
        f'<text class="tick" x="8" y="{y(v) + 4:.1f}">{v:g}</text>'
        for v in (0.0, 0.5, 1.0)
    )
    ticks += "".join(
        f'<text class="tick" x="{x(size):.1f}" y="{CURVE_HEIGHT - 8}">{size}</text>'
        for size in (1, 3, 10, 30, 100, 300, 1000)
        if size <= largest
    )
    lines = "".join(_curve(curve, (x, y)) for curve in result.curves)
    sets = ""
    if result.circuit.random_sets is not None:
        values, place = result.circuit.random_sets.faithfulness, x(result.circuit.size)
        low, high = y(min(values)), y(max(values))
        sets = f'<line class="sets" x1="{place:.1f}" x2="{place:.1f}" y1="{low:.1f}" y2="{high:.1f}"></line>'
    image = (
        f'<svg width="{CURVE_WIDTH}" height="{CURVE_HEIGHT}" role="img" aria-label="Faithfulness over sizes">'
        f"{ticks}{sets}{lines}</svg>"
    )
    note = (
        "Faithfulness F over the number of nodes (log scale), judged prompts. Blue with its 95% band: resample, orange: "
        "mean, green: zero ablation. Gray bar at the chosen size: random sets."
    )
    tables = _table(faithfulness_by_ablation_table(result)) + _table(curve_area_table(result))
    return f'<section><h2>Faithfulness</h2><p class="soft">{escape(note)}</p>{image}{tables}</section>\n'


def _curve(curve: "FaithfulnessCurve", axes: tuple[Any, Any]) -> str:
    x, y = axes
    line = " ".join(f"{x(point.size):.1f},{y(point.faithfulness.value):.1f}" for point in curve.points)
    band = ""
    if curve.ablation == "resample":
        lower = [f"{x(point.size):.1f},{y(point.faithfulness.low):.1f}" for point in curve.points]
        upper = [f"{x(point.size):.1f},{y(point.faithfulness.high):.1f}" for point in curve.points]
        band = f'<polygon class="band" points="{" ".join([*lower, *reversed(upper)])}"></polygon>'
    return f'{band}<polyline class="curve {LINE_CLASSES.get(curve.ablation, "c0")}" points="{line}"></polyline>'


def _members(result: "CircuitResult") -> str:
    rows = [[node, *(value for _, value in _node_rows(result, node)[:4])] for node in result.circuit.nodes]
    head = ("node", "kind", "score", "drop of F without it", "in bootstrap discoveries")
    return f"<section><h2>Members</h2>{_html_table(head, rows)}</section>\n"


def _examples(result: "CircuitResult") -> str:
    rows = [
        (
            item.clean, item.corrupted, ", ".join(item.right), ", ".join(item.wrong), f"{item.clean_metric:+.2f}",
            f"{item.circuit_metric:+.2f}", f"{item.corrupted_metric:+.2f}",
        )
        for item in result.examples[:MAX_EXAMPLES]
    ]  # fmt: skip
    head = ("prompt", "corrupted", "right", "wrong", "metric", "circuit alone", "all nodes replaced")
    return f"<section><h2>Judged prompts</h2>{_html_table(head, rows)}</section>\n" if rows else ""


def _table(table: "TextTable") -> str:
    return _html_table(table.columns, table.rows, table.title)


def _html_table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table>{title}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
