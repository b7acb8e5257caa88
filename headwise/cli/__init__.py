"""Command line interface. One file per command; each command calls one public function.

Results go to standard output, progress and errors to standard error. With `--json` a result is printed as JSON.
"""

import sys
from typing import Annotated

import typer

from headwise import __version__
from headwise.cli import (
    cache,
    circuit,
    claims,
    corpus,
    demo,
    describe,
    diff,
    distill,
    evaluate,
    explain,
    export,
    find,
    generate,
    importance,
    info,
    layout,
    maps,
    plot,
    presets,
    profile,
    prune,
    quantize,
    scan,
    selftest,
    sensitivity,
    steer,
    store,
    sweep,
    train,
    view,
)
from headwise.cli.shell.command_examples import EXAMPLES, ExampleHintCommand, first_steps
from headwise.cli.shell.output_stream import flushed_output, prepare_streams
from headwise.cli.shell.record_sigint_and_raise import record_sigint_and_raise
from headwise.errors import HeadwiseError

COMMANDS = (
    demo, info, layout, generate, export, presets, corpus, train, distill, scan, profile, describe, maps, explain, importance,
    find, circuit, steer, evaluate, prune, quantize,
    sensitivity, cache, diff, sweep, claims, plot, view, store,
    selftest,
)  # fmt: skip
app = typer.Typer(
    name="headwise",
    help="Multi-head attention with the head as a first-class object.",
    pretty_exceptions_enable=False,
)
for command in COMMANDS:
    name = command.__name__.rpartition(".")[2]
    app.command(name, cls=ExampleHintCommand, epilog=f"Example: {EXAMPLES[name]}")(command.run)


def _version(show_version: bool) -> None:
    if show_version:
        print(f"headwise {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Multi-head attention with the head as a first-class object."""
    if context.invoked_subcommand is None:
        print(first_steps())


def main() -> None:
    """Run a command. An error that the user can fix is one line on standard error; Ctrl-C exits with 130."""
    prepare_streams()
    with record_sigint_and_raise() as interrupts:
        try:
            with flushed_output():
                app(prog_name="headwise")
        except HeadwiseError as error:
            if interrupts:  # a library converted Ctrl-C to an error
                sys.exit(130)
            print(f"headwise: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:  # pressed before a command started
            sys.exit(130)
