"""Room 13: the command line. One file per verb; a verb is a thin call of one public function.

Standard output is the result, standard error everything else; `--json` gives every result to a program.
"""

import sys
from typing import Annotated

import typer

from headwise import __version__
from headwise.cli import (
    ablate,
    attend,
    claims,
    corpus,
    demo,
    export,
    generate,
    head,
    heads,
    info,
    plot,
    presets,
    prune,
    sweep,
    train,
    view,
)
from headwise.errors import HeadwiseError

app = typer.Typer(
    name="headwise",
    help="Multi-head attention with the head as a first-class object.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.run)
app.command("info")(info.run)
app.command("generate")(generate.run)
app.command("export")(export.run)
app.command("presets")(presets.run)
app.command("corpus")(corpus.run)
app.command("train")(train.run)
app.command("heads")(heads.run)
app.command("head")(head.run)
app.command("attend")(attend.run)
app.command("ablate")(ablate.run)
app.command("prune")(prune.run)
app.command("sweep")(sweep.run)
app.command("claims")(claims.run)
app.command("plot")(plot.run)
app.command("view")(view.run)


def _version(asked: bool) -> None:
    if asked:
        print(f"headwise {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Multi-head attention with the head as a first-class object."""


def main() -> None:
    """Run a verb; an error a person can put right is one line, not a traceback."""
    try:
        app()
    except HeadwiseError as error:
        print(f"headwise: {error}", file=sys.stderr)
        sys.exit(2)
