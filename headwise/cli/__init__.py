"""The command line. One file per verb; a verb is a thin call of one public function.

Standard output is the result, standard error everything else; `--json` gives every result to a program.
"""

import sys
from typing import Annotated

import typer

from headwise import __version__
from headwise.cli import (
    ablate,
    attend,
    cache,
    claims,
    corpus,
    demo,
    diff,
    distil,
    export,
    generate,
    head,
    heads,
    info,
    layout,
    plot,
    presets,
    prune,
    quantise,
    sensitivity,
    sweep,
    train,
    view,
    why,
)
from headwise.cli.shell.examples import EXAMPLES, Verb, first_steps
from headwise.cli.shell.pressed import noticed
from headwise.errors import HeadwiseError

VERBS = (
    demo, info, layout, generate, export, presets, corpus, train, distil, heads, head, attend, why, ablate, prune, quantise,
    sensitivity, cache, diff, sweep, claims, plot, view,
)  # fmt: skip
app = typer.Typer(
    name="headwise",
    help="Multi-head attention with the head as a first-class object.",
    pretty_exceptions_enable=False,
)
for verb in VERBS:
    name = verb.__name__.rpartition(".")[2]
    app.command(name, cls=Verb, epilog=f"Example: {EXAMPLES[name]}")(verb.run)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"headwise {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Multi-head attention with the head as a first-class object."""
    if context.invoked_subcommand is None:
        print(first_steps())


def main() -> None:
    """Run a verb; an error a person can put right is one line, not a traceback; Ctrl-C ends with 130, as a shell expects."""
    with noticed() as pressed:
        try:
            app(prog_name="headwise")
        except HeadwiseError as error:
            if pressed:  # not an error of theirs: what was being read when it was pressed is whole
                sys.exit(130)
            print(f"headwise: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:  # pressed before a verb had begun
            sys.exit(130)
