"""headwise presets: published model configurations."""

import json
from itertools import groupby
from typing import Any

from headwise.cli.shell.common_options import JsonOption


def run(as_json: JsonOption = False) -> None:
    """List the built-in configurations of published models by year: sizes, positions, norms and gates."""
    from rich.console import Console

    from headwise.spec.presets import PRESETS, presets
    from headwise.ui.terminal_table import make_table

    rows = [_preset_row(name, PRESETS[name]) for name in presets()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    hidden = {"year", "kind", "width", "context", "source"}
    for year, group in groupby(rows, key=lambda row: row["year"]):
        cells = [{key: value for key, value in row.items() if key not in hidden} for row in group]
        Console().print(make_table(str(year), list(cells[0]), [list(row.values()) for row in cells]))


def _preset_row(name: str, published: Any) -> dict[str, Any]:
    from headwise.spec.presets import describe_gates_and_caps, describe_norms, describe_positions

    spec = published.spec
    return {
        "preset": name,
        "year": published.year,
        "kind": spec.kind,
        "layers": spec.layers,
        "heads": spec.attention.heads,
        "kv_heads": spec.attention.kv_heads,
        "width": spec.width,
        "head_dim": spec.attention.head_dim,
        "context": spec.context,
        "positions": describe_positions(spec),
        "norm": describe_norms(spec),
        "gate": describe_gates_and_caps(spec),
        "parameters": spec.num_parameters,
        "source": published.source,
    }
