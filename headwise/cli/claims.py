"""headwise claims: experiments that test common claims about attention heads."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell.common_options import DeviceOption, DtypeOption, ExecutorOption, JsonOption

if TYPE_CHECKING:
    from headwise.experiments.run_claims import ClaimResult

DEFAULT_SEED_FILES = Path("docs/research/data")


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
    seed_files: Annotated[
        Path | None,
        typer.Option(
            help="Folder with one JSON file of figures per seed. Missing seeds are run one by one, then all seeds of the "
            "folder are judged together."
        ),
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="Show how many seeds of --seed-files are finished, and run nothing.")
    ] = False,
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
    if status:
        _show_status(names or [], _status_folder(seed_files), as_json=as_json)
        return
    if seed_files is not None and (model is not None or full or executor is not None):
        raise ArgumentError("--seed-files: cannot be combined with --model, --full or --executor. Use --seeds N.")
    with show_progress() as progress, resume_hint_on_interrupt() if model is None else nullcontext():
        results = _run_seed_files(
            names or [], seed_files, seeds or 0, first_seed, cache=cache, processes=processes, progress=progress
        ) if seed_files is not None else claims(
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


def _run_seed_files(names: list[str], folder: Path, seeds: int, first_seed: int, **options: Any) -> "list[ClaimResult]":
    """Run missing seeds, if a number of seeds is given, and judge all seeds of the folder."""
    from headwise.experiments.seed_runs import judge_seeds, run_seeds

    if not seeds:
        return judge_seeds(folder, names)
    return run_seeds(names, folder, seeds=seeds, first_seed=first_seed, **options)


def _status_folder(folder: Path | None) -> Path:
    """Return the folder of the figures, by default that of this repository if it is the working directory."""
    from headwise.errors import ArgumentError

    folder = DEFAULT_SEED_FILES if folder is None else folder
    if not folder.is_dir():
        raise ArgumentError(f"--seed-files: {folder} is not a folder. Pass the folder with the figures of the seeds.")
    return folder


def _show_status(names: list[str], folder: Path, *, as_json: bool) -> None:
    from dataclasses import asdict

    from headwise.experiments.seed_runs import planned_and_finished_seeds
    from headwise.ui.print_experiments import show_seed_status

    rows = planned_and_finished_seeds(folder, names)
    print(json.dumps([asdict(row) for row in rows], indent=2)) if as_json else show_seed_status(rows, str(folder))
