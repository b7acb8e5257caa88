"""headwise info: sizes of a model."""

import json
from dataclasses import asdict

from headwise.cli.shell.common_options import JsonOption, ModelArgument


def run(
    model: ModelArgument,
    as_json: JsonOption = False,
) -> None:
    """Show the architecture, head counts, parameters, memory and tokenizer of a model, without loading its weights."""
    from rich.console import Console

    from headwise.ui.terminal_table import make_table
    from headwise.weights.model_info import info, info_rows

    facts = info(model)
    if as_json:
        print(json.dumps(asdict(facts), indent=2))
    else:
        Console().print(make_table(model, ["", ""], info_rows(facts)))
