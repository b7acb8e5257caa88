"""headwise sweep: the trade-off of heads."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import ExecutorOption, JsonOption

DEFAULT_HEAD_COUNTS = "1,2,4,8,16,32,width"


def run(
    corpus: Annotated[
        Path | None, typer.Argument(help="A file or folder of text; none: the synthetic language.")
    ] = None,
    num_heads: Annotated[str | None, typer.Option(help="Head counts: 1,2,4,8,16,32,width, the default.")] = None,
    width: Annotated[int, typer.Option(help="Width of the stream.")] = 64,
    head_dim: Annotated[int | None, typer.Option(help="Keep heads this wide: more heads, more parameters.")] = None,
    layers: Annotated[int | None, typer.Option(help="Blocks; 2, or 6 with --depth.")] = None,
    depth: Annotated[
        bool, typer.Option("--depth", help="Instead: the same parameters taken from heads, or from layers.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 2000,
    batch_size: Annotated[int, typer.Option(help="Rows in a step.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="The learning rate at its highest.")] = 2e-3,
    context: Annotated[int, typer.Option(help="Tokens in a row.")] = 128,
    seeds: Annotated[int, typer.Option(help="Models of each kind.")] = 3,
    tokenizer: Annotated[str | None, typer.Option(help="byte, character, word or bpe:SIZE.")] = None,
    processes: Annotated[int | None, typer.Option(help="Trainings side by side; as many as cores.")] = None,
    executor: ExecutorOption = None,
    cache: Annotated[Path | None, typer.Option(help="Where trained models are kept; $HEADWISE_CACHE.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this file: .png, .svg, .pdf, .csv")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train one model for each head count and seed, all else equal, and compare. Ctrl-C stops; run it again to go on."""
    from headwise.errors import HeadwiseError
    from headwise.experiments.head_count_sweep import depth_vs_heads_sweep, head_sweep
    from headwise.ui.experiment_tables import show_sweep
    from headwise.ui.figures.claim_charts import draw_sweep, draw_training_curves
    from headwise.ui.figures.figure_io import check_path
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress

    if depth and (num_heads is not None or head_dim is not None):
        raise HeadwiseError(
            "--depth compares models of 8 heads with fewer layers or fewer heads; leave out --num-heads and --head-dim."
        )
    if plot is not None:
        check_path(plot)
    options: dict[str, Any] = {
        "width": width, "context": context, "corpus": corpus, "tokenizer": tokenizer, "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate, "seeds": seeds, "cache": cache, "processes": processes, "executor": executor,
    }  # fmt: skip
    with show_progress() as progress, resume_hint_on_interrupt():
        if depth:
            result = depth_vs_heads_sweep(layers=6 if layers is None else layers, progress=progress, **options)
        else:
            result = head_sweep(
                _parse_head_counts(num_heads or DEFAULT_HEAD_COUNTS, width),
                head_dim=head_dim,
                layers=2 if layers is None else layers,
                progress=progress,
                **options,
            )
    if plot is not None:
        (draw_training_curves if depth else draw_sweep)(result).save(plot)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        show_sweep(result)


def _parse_head_counts(num_heads: str, width: int) -> list[int]:
    """1,8,width as numbers."""
    from headwise.errors import HeadwiseError

    try:
        return [width if item.strip() == "width" else int(item) for item in num_heads.split(",")]
    except ValueError:
        raise HeadwiseError(
            f"head counts are whole numbers with commas between, or `width`; got {num_heads!r}."
        ) from None
