"""The report: page and data in one self-contained HTML file that works offline."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import FileFormatError
from headwise.io.atomic_write import write_atomic
from headwise.ui.report_data import page_files

# Default sentences of a report: coreference ("it"), possessive ("their"), next-token prediction.
DEFAULT_SENTENCES = (
    "The animal didn't cross the street because it was too tired",
    "The cat sat on the mat because it was soft",
    "The teacher gave the students their homework",
    "The cat sat on the",
)
# All modules use these two forms of import and export, so that bundling only has to remove them.
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def write_report(report_data: Mapping[str, Any], path: str | Path) -> Path:
    """Write the report as one HTML file, atomically."""
    return write_atomic(path, render_report_html(report_data).encode())


def render_report_html(report_data: Mapping[str, Any]) -> str:
    """Render the report as HTML with inlined styles, modules and JSON data."""
    page = {name: content.decode() for name, content in page_files().items()}
    # Escape "<", so that no text in the data can close the script element.
    data = json.dumps(_round_floats(report_data), ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    replacements = {
        '<link rel="stylesheet" href="style.css">': f"<style>\n{page['style.css']}</style>",
        '<script type="module" src="main.js"></script>': (
            f'<script type="application/json" id="report-data">{data}</script>\n'
            f'<script type="module">\n{bundle_js_modules(page)}</script>'
        ),
    }
    html = page["index.html"]
    for placeholder, content in replacements.items():
        if html.count(placeholder) != 1:
            raise FileFormatError(
                f"index.html: expected {placeholder} exactly once. Got {html.count(placeholder)}. Reinstall headwise."
            )
        html = html.replace(placeholder, content)
    return html


def _round_floats(value: Any) -> Any:
    """Round all floats to six significant digits, which is more than the page shows."""
    if isinstance(value, Mapping):
        return {name: _round_floats(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_round_floats(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def bundle_js_modules(page: Mapping[str, str], entry: str = "main.js") -> str:
    """Bundle the modules into one script. Each module comes after the modules it imports."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for imported in _IMPORT.findall(page[name]):
                visit(imported)
            order.append(name)

    visit(entry)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", page[name])) for name in order)
