"""What verbs have in common: arguments that mean the same everywhere, and what a shell offers for them."""

from typing import Annotated, Any

import typer

from headwise.cli.shell import complete

Model = Annotated[
    str,
    typer.Argument(
        help="A bundle (smollm2, minilm), a folder, a file or a hub id.",
        autocompletion=complete.models,
        metavar="MODEL",
    ),
]
Texts = Annotated[list[str] | None, typer.Argument(help="A text, or files; none: the embedded probe set.")]
Executor = Annotated[
    str | None,
    typer.Option(
        help="Who works: processes (the default), dask, dask:tcp://HOST:8786, slurm, slurm:partition=long,timeout_min=600."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def given(**asked: Any) -> dict[str, Any]:
    """Options that were said; the others stay as they are in what they would change."""
    return {name: value for name, value in asked.items() if value is not None}
