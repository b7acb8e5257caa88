"""headwise presets: published model configurations."""

import json

from headwise.cli.shell.common_options import JsonOption


def run(as_json: JsonOption = False) -> None:
    """List the built-in configurations of published models, with their sizes."""
    from rich.console import Console

    from headwise.spec.presets import PRESETS, preset
    from headwise.ui.terminal_table import make_table

    columns = ["preset", "kind", "layers", "heads", "kv_heads", "width", "head_dim", "context", "parameters", "source"]
    rows = []
    for name, (_, _, source) in PRESETS.items():
        spec = preset(name)
        attention = spec.attention
        sizes = [
            spec.layers,
            attention.heads,
            attention.kv_heads,
            spec.width,
            attention.head_dim,
            spec.context,
            spec.num_parameters,
        ]
        rows.append([name, spec.kind, *sizes, source])
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2))
    else:
        Console().print(make_table("Presets", columns, rows))
