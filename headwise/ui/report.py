"""The report: the page and its book in one file that needs nothing else, not even a network."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.io.atomic_write import whole_file
from headwise.ui.report_data import page_files

# Sentences a report shows unless others are given: what does "it" stand for, whose is "their", what comes next.
SENTENCES = (
    "The animal didn't cross the street because it was too tired",
    "The cat sat on the mat because it was soft",
    "The teacher gave the students their homework",
    "The cat sat on the",
)
# The modules keep to one form of import and export, so that joining them is cutting these lines off.
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def write_report(book: Mapping[str, Any], path: str | Path) -> Path:
    """Write one file that opens in any browser, whole or not at all."""
    return whole_file(path, make_report(book).encode())


def make_report(book: Mapping[str, Any]) -> str:
    """The same as text: styles and modules inlined, the book as JSON beside them."""
    page = {name: content.decode() for name, content in page_files().items()}
    # "<" never stands in the data, so nothing in it can end the element it stands in.
    data = json.dumps(_short(book), ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        '<link rel="stylesheet" href="style.css">': f"<style>\n{page['style.css']}</style>",
        '<script type="module" src="main.js"></script>': (
            f'<script type="application/json" id="book">{data}</script>\n<script type="module">\n{joined(page)}</script>'
        ),
    }
    made = page["index.html"]
    for mark, content in parts.items():
        if made.count(mark) != 1:
            raise HeadwiseError(f"the page must have {mark} once; found {made.count(mark)} times.")
        made = made.replace(mark, content)
    return made


def _short(value: Any) -> Any:
    """The same with numbers of six digits, which is more than the page shows."""
    if isinstance(value, Mapping):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def joined(page: Mapping[str, str], first: str = "main.js") -> str:
    """All modules as one: each behind those it imports."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for needed in _IMPORT.findall(page[name]):
                visit(needed)
            order.append(name)

    visit(first)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", page[name])) for name in order)
