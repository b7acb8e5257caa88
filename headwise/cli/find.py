"""headwise find: the heads that do a job described by examples."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import DeviceOption, DtypeOption, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    examples: Annotated[
        Path | None,
        typer.Argument(
            help="JSON Lines file with examples of the job. Default: the examples that come with the model."
        ),
    ] = None,
    job: Annotated[
        str,
        typer.Option(
            help="pairs (a query attends to its gold keys), alignment (cross-attention follows the source), classes (two "
            "classes of inputs), effect (ablation lowers a metric)."
        ),
    ] = "pairs",
    heads: Annotated[
        str, typer.Option(help="Heads to try: 5.1, 5.*, 0-3.*", autocompletion=completion.complete_heads)
    ] = "*",
    metric: Annotated[
        str | None,
        typer.Option(
            help="loss or answer: metric of the job effect, or of the causal test of another job. Default: no causal test."
        ),
    ] = None,
    ablation: Annotated[
        str, typer.Option(help="Replacement of the head output: mean (over the examples) or zero.")
    ] = "mean",
    threshold: Annotated[
        float | None,
        typer.Option(help="Minimum gain over the baseline on both halves. Default: 0.1, or 0 for the job effect."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of bootstrap, permutations and random controls.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write each result to this file. Run the same command again to resume.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the result: .json (for --compare) or .csv (one line per head).")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="Result of another model (--save FILE.json). Show which heads gained or lost the job."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a figure of all heads (.png, .svg, .pdf) or its data (.csv, .json).")
    ] = None,
    alignment_heads: Annotated[
        Path | None,
        typer.Option(help="Write the heads as alignment_heads into generation_config.json of this folder (Whisper)."),
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Maximum number of heads to show, best first.", min=1)] = 12,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the heads that do a job: chosen on one half of the examples, judged on the other."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from headwise.analysis.finding.head_search import find_heads
    from headwise.analysis.finding.head_search_result import HeadSearchResult
    from headwise.attached.whisper_io import check_generation_config_folder, write_alignment_heads
    from headwise.errors import ArgumentError
    from headwise.ui.figures.figure_with_data import check_path
    from headwise.ui.print_head_search import head_search_tables
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress
    from headwise.weights import load

    for path, suffixes in ((plot, None), (save, (".json", ".csv"))):
        if path is not None:
            check_path(path, *(() if suffixes is None else (suffixes,)))
    if alignment_heads is not None:
        if job != "alignment":
            raise ArgumentError(
                f"alignment_heads: needs --job alignment, whose heads are cross-attention. Got {job!r}."
            )
        check_generation_config_folder(alignment_heads)
    other = None if compare is None else HeadSearchResult.load(compare)
    loaded = load(model, device=device, dtype=dtype)
    with resume_hint_on_interrupt() if out is not None else nullcontext(), show_progress(transient=True) as progress:
        result = find_heads(
            loaded, examples, job=job, heads=heads, metric=metric, ablation=ablation, threshold=threshold, seed=seed,  # pyright: ignore[reportArgumentType]
            out=out, progress=progress,
        )  # fmt: skip
    if save is not None:
        (result.to_csv if save.suffix == ".csv" else result.to_json)(save)
    if plot is not None:
        result.plot().save(plot)
    if alignment_heads is not None and result.supported_heads:
        write_alignment_heads(result.supported_heads, alignment_heads)
    changes = None if other is None else other.compare(result)
    if as_json:
        compared = {} if changes is None else {"changes": [asdict(item) | {"change": item.change} for item in changes]}
        print(json.dumps(result.to_dict() | compared, indent=1))
        return
    for table in head_search_tables(result, changes, max_rows):
        Console().print(table)
    if alignment_heads is not None and not result.supported_heads:
        print("No head does the job, so alignment_heads were not written.")
