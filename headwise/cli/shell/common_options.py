"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell import completion

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="Model: a bundle (smollm2, minilm, rxnmapper), folder, file or hub id.",
        autocompletion=completion.complete_models,
        metavar="MODEL",
    ),
]
CorpusArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="A text, text files or folders; for a vision model, a folder of images. Default: the embedded probe set."
    ),
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        help="Executor: processes (default), dask, dask:tcp://HOST:8786, slurm or slurm:partition=long,timeout_min=600."
    ),
]
SensitivityOption = Annotated[
    Path | None,
    typer.Option(
        "--sensitivity",
        help="File written by headwise sensitivity --out for this model. Adds quantization costs to the page.",
    ),
]
PlanOption = Annotated[
    Path | None, typer.Option("--plan", help="Saved plan. Marks the heads that it changes on the page.")
]
DeviceOption = Annotated[
    str,
    typer.Option(help="Device: cpu, cuda, cuda:1, xpu, mps, or auto (the first available of CUDA, XPU, MPS and CPU)."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Data type of the weights: float32, bfloat16, float16 or float64. Default: that of the file; float32 for GGUF."
    ),
]
NoStoreOption = Annotated[
    bool, typer.Option("--no-store", help="Neither read results from the store on disk nor keep new ones there.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def drop_none(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def load_report_inputs(sensitivity: Path | None, plan: Path | None) -> dict[str, Any]:
    """Load the sensitivity file and the plan of a report page."""
    from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult
    from headwise.spec import Plan

    inputs = {"sensitivity": None if sensitivity is None else SensitivityResult.load(sensitivity)}
    return drop_none(**inputs, plan=None if plan is None else Plan.load(plan))
