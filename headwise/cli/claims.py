"""headwise claims: what guides say about heads, put to the test."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell.common_options import ExecutorOption, JsonOption


def run(
    names: Annotated[list[str] | None, typer.Argument(help="Claims by name or number; none: all.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Only say which there are.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, verdicts indicative: the default.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Three seeds, with intervals.")] = False,
    seeds: Annotated[int | None, typer.Option(help="So many seeds instead.")] = None,
    first_seed: Annotated[int, typer.Option(help="Seeds from this one on.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="Try those that apply on this model: a bundle, folder, file, hub id.")
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="With --model: a file of text; none: the embedded probe set.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page, pictures and figures into this folder.")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes side by side; as many as cores.")] = None,
    executor: ExecutorOption = None,
    cache: Annotated[Path | None, typer.Option(help="Where models and results are kept; $HEADWISE_CACHE.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment for each claim and say whether it holds. Ctrl-C stops; run it again to go on."""
    from headwise.errors import HeadwiseError
    from headwise.experiments.registry import find_claims
    from headwise.experiments.run_claims import claims
    from headwise.ui.experiment_tables import show_claim_list, show_claims, write_claims
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress

    if quick and (full or seeds is not None):
        raise HeadwiseError("--quick takes one seed, --full three, --seeds so many; give one of them.")
    if corpus is not None and model is None:
        raise HeadwiseError("--corpus is what the model of --model reads; give --model MODEL too.")
    selected = find_claims(names or [])
    if list_only:
        listing = [{"number": claim.number, "name": claim.name, "statement": claim.statement} for claim in selected]
        print(json.dumps(listing, indent=2)) if as_json else show_claim_list(selected)
        return
    with show_progress() as progress, resume_hint_on_interrupt() if model is None else nullcontext():
        results = claims(
            names or [], full=full, seeds=seeds, first_seed=first_seed, model=model, corpus=corpus, cache=cache,
            processes=processes,
            executor=executor, progress=progress, log=lambda line: print(line, file=sys.stderr),
        )  # fmt: skip
    if out is not None:
        write_claims(results, out)
    if as_json:
        print(json.dumps([result.to_dict() for result in results], indent=2))
    else:
        show_claims(results)
