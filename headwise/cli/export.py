"""headwise export: a folder that transformers loads."""

import json
from typing import Annotated

import typer

from headwise.cli.shell.words import Json, Model


def run(
    model: Model,
    folder: Annotated[str, typer.Argument(help="Where to write it.")],
    family: Annotated[
        str | None, typer.Option(help="gpt2, gpt-neo, bert or llama; left out: the one it came from.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a model as a folder that transformers loads; cut heads become zeros."""
    from headwise.weights import export, load

    written = export(load(model), folder, family)
    files = sorted(path.name for path in written.iterdir())
    print(json.dumps({"folder": str(written), "files": files}) if as_json else f"{written}: {', '.join(files)}")
