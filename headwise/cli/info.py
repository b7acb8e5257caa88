"""headwise info: what a model is."""

import json
from dataclasses import asdict

from headwise.cli.shell.common_options import Json, Model


def run(
    model: Model,
    as_json: Json = False,
) -> None:
    """Tell what a model is: its sizes, heads, parameters, memory and tokenizer. Weights are not read."""
    from rich.console import Console

    from headwise.ui.tables import make_table
    from headwise.weights.info import as_rows, info

    facts = info(model)
    if as_json:
        print(json.dumps(asdict(facts), indent=2))
    else:
        Console().print(make_table(model, ["", ""], as_rows(facts)))
