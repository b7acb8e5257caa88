"""What verbs have in common: arguments that mean the same everywhere, and what a shell offers for them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell import completion

Model = Annotated[
    str,
    typer.Argument(
        help="A bundle (smollm2, minilm), a folder, a file or a hub id.",
        autocompletion=completion.models,
        metavar="MODEL",
    ),
]
Texts = Annotated[
    list[str] | None, typer.Argument(help="A text, or files; none: the embedded probe set. Or a folder of pictures.")
]
Executor = Annotated[
    str | None,
    typer.Option(
        help="Who works: processes (the default), dask, dask:tcp://HOST:8786, slurm, slurm:partition=long,timeout_min=600."
    ),
]
Costs = Annotated[Path | None, typer.Option("--costs", help="Show what headwise sensitivity --out kept of this model.")]
Planned = Annotated[Path | None, typer.Option("--plan", help="Show what this plan would do to its heads.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def given(**options: Any) -> dict[str, Any]:
    """Options that were said; the others stay as they are in what they would change."""
    return {name: value for name, value in options.items() if value is not None}


def prices(costs: Path | None, plan: Path | None) -> dict[str, Any]:
    """What a page is told of prices, read from files."""
    from headwise.analysis.ablation.sensitivity import Sensitivity
    from headwise.compression.plan import Plan

    made = {"sensitivity": None if costs is None else Sensitivity.load(costs)}
    return given(**made, plan=None if plan is None else Plan.load(plan))
