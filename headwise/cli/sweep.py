"""headwise sweep: the trade-off of heads."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import Executor, Json

HEADS = "1,2,4,8,16,32,width"


def run(
    text: Annotated[Path | None, typer.Argument(help="A file or folder of text; none: the little language.")] = None,
    heads: Annotated[str | None, typer.Option(help="Head counts: 1,2,4,8,16,32,width, the default.")] = None,
    width: Annotated[int, typer.Option(help="Width of the stream.")] = 64,
    head_dim: Annotated[int | None, typer.Option(help="Keep heads this wide: more heads, more parameters.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks; 2, or 6 with --depth.")] = None,
    depth: Annotated[
        bool, typer.Option("--depth", help="Instead: the same parameters taken from heads, or from layers.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 2000,
    batch: Annotated[int, typer.Option(help="Rows in a step.")] = 16,
    rate: Annotated[float, typer.Option(help="The learning rate at its highest.")] = 2e-3,
    context: Annotated[int, typer.Option(help="Tokens in a row.")] = 128,
    seeds: Annotated[int, typer.Option(help="Models of each kind.")] = 3,
    tokenizer: Annotated[str | None, typer.Option(help="byte, character, word or bpe:SIZE.")] = None,
    processes: Annotated[int | None, typer.Option(help="Trainings side by side; as many as cores.")] = None,
    executor: Executor = None,
    cache: Annotated[Path | None, typer.Option(help="Where trained models are kept; $HEADWISE_CACHE.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file: .png, .svg, .pdf, .csv")] = None,
    as_json: Json = False,
) -> None:
    """Train one model for each head count and seed, all else equal, and compare. Ctrl-C stops; run it again to go on."""
    from headwise.errors import HeadwiseError
    from headwise.experiments.head_sweep import depth_or_heads, head_sweep
    from headwise.ui.experiments_view import show_sweep
    from headwise.ui.figures.claims import draw_curves, draw_sweep
    from headwise.ui.figures.figure_io import check_path
    from headwise.ui.progress import going_on, show_progress

    if depth and (heads is not None or head_dim is not None):
        raise HeadwiseError(
            "--depth compares models of 8 heads with fewer layers or fewer heads; leave out --heads and --head-dim."
        )
    if plot is not None:
        check_path(plot)
    shared: dict[str, Any] = {
        "width": width, "context": context, "corpus": text, "tokenizer": tokenizer, "steps": steps, "batch": batch,
        "rate": rate, "seeds": seeds, "cache": cache, "processes": processes, "executor": executor,
    }  # fmt: skip
    with show_progress() as progress, going_on():
        if depth:
            made = depth_or_heads(layers=6 if layers is None else layers, progress=progress, **shared)
        else:
            made = head_sweep(
                _counts(heads or HEADS, width),
                head_dim=head_dim,
                layers=2 if layers is None else layers,
                progress=progress,
                **shared,
            )
    if plot is not None:
        (draw_curves if depth else draw_sweep)(made).save(plot)
    if as_json:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        show_sweep(made)


def _counts(heads: str, width: int) -> list[int]:
    """1,8,width as numbers."""
    from headwise.errors import HeadwiseError

    try:
        return [width if one.strip() == "width" else int(one) for one in heads.split(",")]
    except ValueError:
        raise HeadwiseError(f"head counts are whole numbers with commas between, or `width`; got {heads!r}.") from None
