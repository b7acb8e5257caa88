"""headwise claims: experiments that test common claims about attention heads."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell.common_options import DeviceOption, DtypeOption, ExecutorOption, JsonOption


def run(
    names: Annotated[list[str] | None, typer.Argument(help="Names or numbers of claims. Default: all.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the claims without running them.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed; verdicts are indicative. This is the default.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Three seeds, with confidence intervals.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, instead of --quick or --full.")] = None,
    first_seed: Annotated[int, typer.Option(help="First seed.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="Run the claims that apply on this model: a bundle, folder, file or hub id.")
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="With --model: a text file. Default: the embedded probe set.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the report page, the figures and the numbers to this folder.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Number of parallel processes. Default: the number of cores.")
    ] = None,
    executor: ExecutorOption = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of cached models and results. Default: $HEADWISE_CACHE.")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment for each claim and report its verdict. After Ctrl-C, run the same command again to resume."""
    from headwise.errors import ArgumentError
    from headwise.experiments.registry import find_claims
    from headwise.experiments.run_claims import claims
    from headwise.ui.print_experiments import show_claim_list, show_claims, write_claims
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress

    if quick and (full or seeds is not None):
        raise ArgumentError("--quick, --full, --seeds: these options exclude each other. Use one of them.")
    if model is None and (corpus is not None or device != "cpu" or dtype is not None):
        raise ArgumentError("--corpus, --device, --dtype: require --model. Add --model MODEL.")
    selected = find_claims(names or [])
    if list_only:
        listing = [{"number": claim.number, "name": claim.name, "statement": claim.statement} for claim in selected]
        print(json.dumps(listing, indent=2)) if as_json else show_claim_list(selected)
        return
    with show_progress() as progress, resume_hint_on_interrupt() if model is None else nullcontext():
        results = claims(
            names or [], full=full, seeds=seeds, first_seed=first_seed, model=model, corpus=corpus, device=device,
            dtype=dtype, cache=cache,
            processes=processes,
            executor=executor, progress=progress, log=lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
    if out is not None:
        write_claims(results, out)
    if as_json:
        print(json.dumps([result.to_dict() for result in results], indent=2))
    else:
        show_claims(results)
