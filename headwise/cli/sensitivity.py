"""headwise sensitivity: what few bits cost, head by head."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import Json, Model, Texts


def run(
    model: Model,
    text: Texts = None,
    bits: Annotated[str, typer.Option(help="Bits, with commas between: 8,4,3,2")] = "4",
    parts: Annotated[str, typer.Option(help="qk, vo (weights), keys, values (cached), with commas between.")] = "qk,vo",
    heads: Annotated[str, typer.Option(help="Which heads: 5.1, 5.*, 0-3.*", autocompletion=completion.heads)] = "*",
    group: Annotated[int, typer.Option(help="Numbers along the input that share a scale.")] = 32,
    basis: Annotated[
        str | None, typer.Option(help="given, balanced or random; none: balanced, where it is known.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a unit of plain text.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many texts; a long one is cut, and each piece counts.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Keep every answer in this file; the same call goes on with it.")
    ] = None,
    most: Annotated[int, typer.Option(help="How many rows to show.")] = 20,
    plot: Annotated[Path | None, typer.Option(help="Draw a grid of heads: .png, .svg, .pdf; or .csv, .json")] = None,
    as_json: Json = False,
) -> None:
    """Store one head at a time at few bits and say what the model loses, with intervals."""
    from dataclasses import fields
    from typing import Any

    from rich.console import Console

    from headwise.analysis.ablation.head_outputs import read_on
    from headwise.analysis.ablation.sensitivity import Cost, sensitivity
    from headwise.errors import HeadwiseError
    from headwise.text.corpus import Corpus
    from headwise.ui.figures.figure_io import check_path
    from headwise.ui.progress import going_on, show_progress
    from headwise.ui.quantization_view import draw_costs
    from headwise.ui.tables import make_table
    from headwise.weights import load

    if plot is not None:
        check_path(plot)
    if not all(one.strip().isdigit() for one in bits.split(",")):
        raise HeadwiseError(f"bits are numbers with commas between, 4,3; got {bits!r}.")
    loaded: Any = load(model)
    texts = read_on(loaded, Corpus.named(text, None), length).first(limit)
    with going_on() if out is not None else nullcontext(), show_progress() as progress:
        found = sensitivity(
            loaded, texts, bits=[int(one) for one in bits.split(",")], parts=[one.strip() for one in parts.split(",")],
            heads=heads, group=group, basis=basis, longest=length, out=out,  # pyright: ignore[reportArgumentType]
            progress=progress,
        )  # fmt: skip
    if plot is not None:
        draw_costs(found).save(plot)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    columns = [field.name for field in fields(Cost)]
    clean = "" if found.clean is None else f"; untouched {found.clean:.3f}"
    title = f"What few bits cost, {found.metric}, {len(found.counts)} texts{clean}"
    rows = [
        [f"{one:.5f}" if isinstance(one, float) and math.isfinite(one) else one for one in row]
        for row in found.rows()[:most]
    ]
    Console().print(make_table(title, columns, rows))  # a single head moves the loss by less than three digits show
