"""What verbs have in common: arguments that mean the same everywhere, and what a shell offers for them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell import completion

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A bundle (smollm2, minilm), a folder, a file or a hub id.",
        autocompletion=completion.complete_models,
        metavar="MODEL",
    ),
]
CorpusArgument = Annotated[
    list[str] | None, typer.Argument(help="A text, or files; none: the embedded probe set. Or a folder of pictures.")
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        help="Who works: processes (the default), dask, dask:tcp://HOST:8786, slurm, slurm:partition=long,timeout_min=600."
    ),
]
SensitivityOption = Annotated[
    Path | None, typer.Option("--sensitivity", help="Show what headwise sensitivity --out kept of this model.")
]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="Show what this plan would do to its heads.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def drop_none(**options: Any) -> dict[str, Any]:
    """Options that were said; the others stay as they are in what they would change."""
    return {name: value for name, value in options.items() if value is not None}


def load_report_inputs(sensitivity: Path | None, plan: Path | None) -> dict[str, Any]:
    """What a page is told of prices, read from files."""
    from headwise.analysis.ablation.sensitivity import Sensitivity
    from headwise.spec import Plan

    inputs = {"sensitivity": None if sensitivity is None else Sensitivity.load(sensitivity)}
    return drop_none(**inputs, plan=None if plan is None else Plan.load(plan))
