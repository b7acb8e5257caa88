"""Page of a scan: one self-contained HTML file without scripts. All text is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.io.atomic_write import write_atomic
from headwise.ui.scan_text import (
    answer_layer_sentence,
    contribution_text,
    layer_label,
    percent,
    prediction_text,
    role_note,
)

if TYPE_CHECKING:
    from headwise.analysis.attribution.scan import LayerPrediction, Scan, ScannedHead

MAX_PARTS = 16  # contributions shown
MAX_STRIP_TOKENS = 400  # tokens of a text shown per head; a longer text shows the tokens with the largest weights
STYLE = """
.hw-scan { --paper: #ffffff; --ground: #f5f6f8; --text: #1b2230; --soft: #5a6474; --line: #d6dae1; --up: #2459b3;
  --down: #b3261e; --ink: 36, 89, 179; font: 15px/1.45 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  color: var(--text); background: var(--ground); padding: 16px; }
@media (prefers-color-scheme: dark) { .hw-scan { --paper: #181c24; --ground: #10131a; --text: #e6e9ef; --soft: #a0a9b8;
  --line: #343b48; --up: #7fb2ff; --down: #ff8a80; --ink: 127, 178, 255; } }
.hw-scan * { box-sizing: border-box; }
.hw-scan h1 { font-size: 19px; margin: 0 0 8px; } .hw-scan h2 { font-size: 16px; margin: 0 0 8px; }
.hw-scan h3 { font-size: 15px; margin: 0; }
.hw-scan section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px;
  margin: 0 auto 12px; max-width: 1100px; }
.hw-scan p { margin: 0 0 8px; } .hw-scan .soft { color: var(--soft); font-size: 13px; }
.hw-scan .row { display: grid; grid-template-columns: minmax(70px, 110px) minmax(50px, 1fr) 64px;
  gap: 8px; align-items: center; margin: 2px 0; font-variant-numeric: tabular-nums; }
.hw-scan .row > :first-child { overflow-wrap: anywhere; } .hw-scan .row > :last-child { text-align: right; }
.hw-scan .track { background: var(--ground); height: 12px; border-radius: 3px; position: relative; }
.hw-scan .bar { position: absolute; top: 0; bottom: 0; border-radius: 3px; background: var(--up); }
.hw-scan .bar.down { background: var(--down); }
.hw-scan .columns { columns: 400px; column-gap: 28px; margin-bottom: 8px; }
.hw-scan .columns .row { grid-template-columns: 84px minmax(40px, 1fr) 110px; break-inside: avoid; }
.hw-scan .heads { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 12px; }
.hw-scan article { border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; min-width: 0; }
.hw-scan dl { display: grid; grid-template-columns: auto 1fr; gap: 0 10px; margin: 6px 0; } .hw-scan dd { margin: 0; }
.hw-scan dt { color: var(--soft); }
.hw-scan .tokens { line-height: 1.9; overflow-wrap: anywhere; }
.hw-scan .token { border-radius: 3px; padding: 2px 1px; white-space: pre-wrap; }
.hw-scan .here { outline: 2px solid var(--up); }
"""


def write_scan_page(scan: "Scan", path: str | Path) -> Path:
    """Write the page of a scan, atomically."""
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>Scan: {escape(_shorten(scan.text))}</title>\n"
        '<link rel="icon" href="data:,">\n<style>body { margin: 0; }</style>\n</head>\n<body>\n'
        f"{scan_html(scan)}\n</body>\n</html>\n"
    )
    return write_atomic(path, page.encode())


def scan_html(scan: "Scan") -> str:
    """Return the content of the page, for the file and for notebooks."""
    parts = [_prediction(scan), _layer_predictions_section(scan), _contributions(scan), _heads(scan), _notes(scan)]
    return f'<style>{STYLE}</style>\n<main class="hw-scan">\n{"".join(part for part in parts if part)}</main>'


def _prediction(scan: "Scan") -> str:
    bars = "".join(
        _row(repr(item.token), percent(item.probability), 0.0, item.probability) for item in scan.predictions
    )
    source = f'<p class="tokens">Source: {_strip(scan.source_tokens, (), None)}</p>' if scan.source_tokens else ""
    return _section(
        "h1", "Scan of one text",
        f'{source}<p class="tokens">{_strip(scan.tokens, (), scan.position)}</p>{_paragraph(prediction_text(scan))}{bars}',
    )  # fmt: skip


def _layer_predictions_section(scan: "Scan") -> str:
    if not scan.layers or scan.answer is None:
        return ""

    def row(item: "LayerPrediction") -> str:
        name = "embedding" if item.layer < 0 else f"layer {item.layer}"
        label = f"{percent(item.probability)} · #{item.rank:,}"
        return _row(name, label, 0.0, item.probability, f"top token {item.top_token!r} {percent(item.top_probability)}")

    note = (
        f"Logit lens: probability and #rank of {scan.answer.token!r}, read from the residual stream after each layer. "
        "Hover over a bar for the top token."
    )
    rows = "".join(row(item) for item in scan.layers)
    tops = _top_token_runs_text(scan.layers)
    return _section(
        "h2",
        "Layers",
        f'{_paragraph(answer_layer_sentence(scan))}{_soft(note)}<div class="columns">{rows}</div>{_soft(tops)}',
    )


def _top_token_runs_text(layers: Sequence["LayerPrediction"]) -> str:
    """List the top token of the layers, joining layers in a row with the same token."""
    runs: list[list[LayerPrediction]] = []
    for item in layers:
        if runs and runs[-1][0].top_token == item.top_token:
            runs[-1].append(item)
        else:
            runs.append([item])
    return "Top token: " + "; ".join(
        f"{layer_label(run[0].layer)}{f' to {run[-1].layer}' if len(run) > 1 else ''} {run[0].top_token!r}"
        for run in runs
    )


def _contributions(scan: "Scan") -> str:
    attribution = scan.attribution
    if attribution is None:
        return ""
    parts = attribution.top_parts(MAX_PARTS)
    rest = attribution.total - sum(value for _, value in parts)
    parts = [*parts, ("all others", rest)] if len(attribution.parts) > MAX_PARTS else parts
    largest = max((abs(value) for _, value in parts), default=0.0) or 1.0
    scaled = [(name, value, value / largest / 2) for name, value in parts]  # bars start in the middle of the track
    rows = "".join(
        _row(_part_label(name), f"{value:+.2f}", min(0.5, 0.5 + size), abs(size), down=value < 0)
        for name, value, size in scaled
    )
    note = (
        "Direct contributions to the logit. Together they add up to it. Effects through later layers are not included."
    )
    return _section("h2", "Contributions", f"{_paragraph(contribution_text(scan))}{_soft(note)}{rows}")


def _heads(scan: "Scan") -> str:
    if not scan.heads:
        return ""
    cards = "".join(_head_card(scan, head) for head in scan.heads)
    where = f"the last token ({scan.token!r})" if scan.position == len(scan.tokens) - 1 else f"{scan.token!r}"
    note = f"Shading: attention weight from {where}. Loss: −log p of the answer in nats, with the head set to zero."
    return _section("h2", "Heads", f'{_soft(f"{note} {role_note(scan)}")}<div class="heads">{cards}</div>')


def _head_card(scan: "Scan", head: "ScannedHead") -> str:
    facts: list[tuple[str, str]] = []
    if head.contribution is not None:
        facts.append(("contribution", f"{head.contribution:+.3f}"))
    if head.loss == head.loss and scan.answer is not None:  # not NaN
        facts.append(("loss without it", f"{head.loss:.3f} ({head.loss_increase:+.3f})"))
    elif head.loss == head.loss:
        facts.append(("1 − cosine without it", f"{head.loss:.4f}"))
    if scan.predictions and head.prediction and head.prediction != scan.predictions[0].token:
        facts.append(("then predicts", repr(head.prediction)))
    if head.attended or head.first_token_weight is not None:
        named = ", ".join(f"{item.token.strip() or repr(item.token)} {item.weight:.2f}" for item in head.attended)
        first = f"first token {head.first_token_weight:.2f}" if head.first_token_weight is not None else ""
        facts.append(("attends to", "; ".join(part for part in (named, first) if part)))
    if head.role:
        facts.append(("role", head.role))
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    tokens = scan.source_tokens if head.keys == "source" else scan.tokens
    strip = _strip(tokens[: len(head.weights)], head.weights, None) if head.weights else ""
    return f'<article><h3>Head {escape(head.head)}</h3><dl>{listed}</dl><div class="tokens">{strip}</div></article>'


def _notes(scan: "Scan") -> str:
    return _section("h2", "Left out", "".join(map(_paragraph, scan.notes))) if scan.notes else ""


def _strip(tokens: Sequence[str], weights: Sequence[float], position: int | None) -> str:
    """Return tokens in a row, shaded by weight. A long text keeps the tokens with the largest weights, or its end."""
    indices: Iterable[int] = range(len(tokens))
    if len(tokens) > MAX_STRIP_TOKENS:
        order = sorted(indices, key=lambda i: -weights[i]) if weights else list(reversed(range(len(tokens))))
        indices = sorted({*order[:MAX_STRIP_TOKENS], *(() if position is None else (position,))})
    spans, previous = [], -1
    for i in indices:
        gap = " … " if i != previous + 1 else ""
        style = ""
        if weights:
            style = f' style="background: rgba(var(--ink), {0.65 * weights[i]:.3f})" title="{weights[i]:.3f}"'
        outline = " here" if i == position else ""
        spans.append(f'{gap}<span class="token{outline}"{style}>{escape(tokens[i])}</span>')
        previous = i
    return "".join(spans)


def _row(name: str, label: str, start: float, width: float, title: str = "", *, down: bool = False) -> str:
    """Return a row with a bar. Start and width are fractions of the track."""
    hint = f' title="{escape(title)}"' if title else ""
    bar = f'<span class="bar{" down" if down else ""}" style="left: {100 * start:.2f}%; width: {100 * width:.2f}%"></span>'
    return (
        f'<div class="row"{hint}><span>{escape(name)}</span><span class="track">{bar}</span>'
        f"<span>{escape(label)}</span></div>"
    )


def _section(level: str, title: str, body: str) -> str:
    return f"<section><{level}>{escape(title)}</{level}>{body}</section>\n"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""


def _soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def _part_label(name: str) -> str:
    """Return the name of a part: a head, an MLP, the embedding or the biases."""
    return (
        f"MLP {name.removeprefix('mlp.')}"
        if name.startswith("mlp.")
        else f"head {name}"
        if name[:1].isdigit()
        else name
    )


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
