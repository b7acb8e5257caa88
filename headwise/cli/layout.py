"""headwise layout: what each of several processes holds and sends."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from headwise.cli.shell.common_options import Json, Model


def run(
    model: Model,
    processes: Annotated[int, typer.Option(help="Among how many processes the model is shared out.")] = 8,
    context: Annotated[int | None, typer.Option(help="Tokens of a text; the model's own context.")] = None,
    batch: Annotated[int, typer.Option(help="Texts read at once.")] = 1,
    element: Annotated[int, typer.Option(help="Bytes of a number, but training is in float32.")] = 2,
    head_processes: Annotated[int, typer.Option(help="How many share heads in the grid, fsdp+heads.")] = 2,
    as_json: Json = False,
) -> None:
    """Count memory and traffic of each process, by how a model is laid out over them. MODEL may be a preset."""
    from rich.console import Console

    from headwise.spec.parallel_cost import forward_flops, layout
    from headwise.ui.tables import make_table
    from headwise.weights.info import spec_of

    spec = spec_of(model)
    made = layout(spec, processes, context, batch=batch, element=element, head_processes=head_processes)
    if as_json:
        print(json.dumps([asdict(one) for one in made], indent=2))
        return
    columns = ["layout", "texts × heads", "weights", "cache", "training", "gathered", "sent, forward", "sent, step", ""]
    rows = [
        [one.name, one.axes, *([""] * 6 if one.refused else map(_gigabytes, sizes)), one.refused]
        for one in made
        for sizes in [(one.weights, one.cache, one.training, one.gathered, one.forward, one.step)]
    ]
    flops = forward_flops(spec, context) / 1e9
    Console().print(make_table(f"{model}, {processes} processes, GB each; {flops:,.3g} GFLOP a token", columns, rows))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3g}"
