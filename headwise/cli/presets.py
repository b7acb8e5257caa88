"""headwise presets: the well-known configurations."""

import json

from headwise.cli.shell.common_options import Json


def run(as_json: Json = False) -> None:
    """List the well-known configurations with their sizes."""
    from rich.console import Console

    from headwise.spec.presets import ROWS, preset
    from headwise.ui.tables import make_table

    columns = ["preset", "kind", "layers", "heads", "kv_heads", "width", "head_dim", "context", "parameters", "source"]
    rows = []
    for name, (_, _, source) in ROWS.items():
        spec = preset(name)
        heads = spec.attention
        sizes = [spec.layers, heads.heads, heads.kv_heads, spec.width, heads.head_dim, spec.context, spec.parameters]
        rows.append([name, spec.kind, *sizes, source])
    if as_json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2))
    else:
        Console().print(make_table("Presets", columns, rows))
