"""headwise sweep: models with different head counts, trained and compared."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.shell.common_options import ExecutorOption, JsonOption

DEFAULT_HEAD_COUNTS = "1,2,4,8,16,32,width"


def run(
    corpus: Annotated[Path | None, typer.Argument(help="Text file or folder. Default: the synthetic language.")] = None,
    num_heads: Annotated[
        str | None, typer.Option(help="Head counts, comma-separated. Default: 1,2,4,8,16,32,width.")
    ] = None,
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 64,
    head_dim: Annotated[
        int | None, typer.Option(help="Fixed head dimension: more heads mean more parameters. Default: width / heads.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers. Default: 2, or 6 with --depth.")] = None,
    depth: Annotated[
        bool,
        typer.Option("--depth", help="Compare removing heads with removing layers, at an equal number of parameters."),
    ] = False,
    steps: Annotated[int, typer.Option(help="Training steps per model.")] = 2000,
    batch_size: Annotated[int, typer.Option(help="Sequences per training step.")] = 16,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = 128,
    seeds: Annotated[int, typer.Option(help="Number of models per configuration, one per seed.")] = 3,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Tokenizer: byte, character, word or bpe:SIZE. Default: word for the synthetic language, else byte."
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Number of parallel trainings. Default: the number of cores.")
    ] = None,
    executor: ExecutorOption = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of cached models. Default: $HEADWISE_CACHE.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a figure (.png, .svg, .pdf) or its data (.csv).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train one model per head count and seed and compare them. After Ctrl-C, run the same command again to resume."""
    from headwise.errors import ArgumentError
    from headwise.experiments.head_count_sweep import depth_vs_heads_sweep, head_sweep
    from headwise.ui.figures.claim_charts import draw_sweep, draw_training_curves
    from headwise.ui.figures.figure_with_data import check_path
    from headwise.ui.print_experiments import show_sweep
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress

    if depth and (num_heads is not None or head_dim is not None):
        raise ArgumentError(
            "--depth: compares models of 8 heads with models of fewer layers or fewer heads, so --num-heads and --head-dim "
            "do not apply. Remove them."
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
    """Parse a list such as `1,8,width`."""
    from headwise.errors import ArgumentError

    try:
        return [width if item.strip() == "width" else int(item) for item in num_heads.split(",")]
    except ValueError:
        raise ArgumentError(
            f"--num-heads: not a comma-separated list of integers or 'width'. Got {num_heads!r}. "
            "Use, for example, --num-heads 1,8,width."
        ) from None
