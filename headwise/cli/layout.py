"""headwise layout: what each of several processes holds and sends."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from headwise.cli.shell.common_options import JsonOption, ModelArgument


def run(
    model: ModelArgument,
    processes: Annotated[int, typer.Option(help="Among how many processes the model is shared out.")] = 8,
    context: Annotated[int | None, typer.Option(help="Tokens of a text; the model's own context.")] = None,
    batch: Annotated[int, typer.Option(help="Texts read at once.")] = 1,
    element_bytes: Annotated[int, typer.Option(help="Bytes of a number, but training is in float32.")] = 2,
    head_processes: Annotated[int, typer.Option(help="How many share heads in the grid, fsdp+heads.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Count memory and traffic of each process, by how a model is laid out over them. MODEL may be a preset."""
    from rich.console import Console

    from headwise.distributed.parallel_cost import forward_flops_per_token, layout
    from headwise.ui.terminal_table import make_table
    from headwise.weights.model_info import spec_of

    spec = spec_of(model)
    costs = layout(spec, processes, context, batch=batch, element_bytes=element_bytes, head_processes=head_processes)
    if as_json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    columns = ["layout", "texts × heads", "weights", "cache", "training", "gathered", "sent, forward", "sent, step", ""]
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
    Console().print(make_table(f"{model}, {processes} processes, GB each; {flops:,.3g} GFLOP a token", columns, rows))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3g}"
