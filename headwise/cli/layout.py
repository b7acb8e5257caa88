"""headwise layout: memory and traffic of each process under each parallel strategy."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from headwise.cli.shell.common_options import JsonOption, ModelArgument


def run(
    model: ModelArgument,
    processes: Annotated[int, typer.Option(help="Number of processes.")] = 8,
    context: Annotated[int | None, typer.Option(help="Tokens per text. Default: the context of the model.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts per batch.")] = 1,
    element_bytes: Annotated[
        int, typer.Option(help="Bytes per element at inference. Training is counted in float32.")
    ] = 2,
    head_processes: Annotated[
        int, typer.Option(help="For fsdp+heads: number of processes among which the heads are divided.")
    ] = 2,
    as_json: JsonOption = False,
) -> None:
    """Compute the memory and traffic of each process for ddp, fsdp and head parallelism. MODEL may be a preset."""
    from rich.console import Console

    from headwise.distributed.parallel_strategy_cost import forward_flops_per_token, layout
    from headwise.ui.terminal_table import make_table
    from headwise.weights.model_info import spec_of

    spec = spec_of(model)
    costs = layout(
        spec, processes, context, batch_size=batch_size, element_bytes=element_bytes, head_processes=head_processes
    )
    if as_json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    columns = [
        "layout",
        "data × heads",
        "weights",
        "cache",
        "training",
        "gathered",
        "sent per forward",
        "sent per step",
        "",
    ]
    rows = [
        [cost.name, cost.mesh_shape, *([""] * 6 if cost.error else map(_gigabytes, sizes)), cost.error]
        for cost in costs
        for sizes in [
            (
                cost.weight_bytes,
                cost.cache_bytes,
                cost.training_bytes,
                cost.gathered_bytes,
                cost.forward_traffic,
                cost.step_traffic,
            )
        ]
    ]
    flops = forward_flops_per_token(spec, context) / 1e9
    Console().print(
        make_table(f"{model}: GB per process with {processes} processes; {flops:,.3g} GFLOPs per token", columns, rows)
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3g}"
