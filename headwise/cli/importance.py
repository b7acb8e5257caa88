"""headwise ablate: what every head is worth."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import Json, Model, Texts


def run(
    model: Model,
    text: Texts = None,
    source: Annotated[
        Path | None, typer.Option(help="What an encoder-decoder reads; TEXT has its answers, line by line.")
    ] = None,
    heads: Annotated[str, typer.Option(help="Which heads: 5.1, 5.*, 0-3.*", autocompletion=completion.heads)] = "*",
    by: Annotated[str, typer.Option(help="ablation (exact), gradient or attribution (quick).")] = "ablation",
    how: Annotated[str, typer.Option(help="What stands in for a head: mean, zero or resample.")] = "mean",
    metric: Annotated[str, typer.Option(help="loss (all tokens) or last (the last one).")] = "loss",
    length: Annotated[int | None, typer.Option(help="Tokens of a unit of plain text.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many texts; a long one is cut, and each piece counts.")] = 32,
    most: Annotated[int, typer.Option(help="How many heads to show.")] = 20,
    as_json: Json = False,
) -> None:
    """Take heads away one by one and say what the model loses, with intervals."""
    from dataclasses import fields

    from rich.console import Console

    from headwise.analysis.ablation.head_outputs import read_on
    from headwise.analysis.ablation.importance import Worth, importance
    from headwise.text.corpus import Corpus
    from headwise.ui.progress import show_progress
    from headwise.ui.tables import make_table
    from headwise.weights import load

    loaded = load(model)
    on = read_on(loaded, Corpus.named(text, source), length).first(limit)
    with show_progress() as progress:
        worth = importance(
            loaded, on, by=by, how=how, heads=heads, metric=metric,  # pyright: ignore[reportArgumentType]
            progress=progress,
        )  # fmt: skip
    if as_json:
        print(json.dumps(worth.to_dict(), indent=2))
        return
    columns = [field.name.replace("_", " ") for field in fields(Worth)]
    Console().print(make_table(f"What the model loses without a head, by {by}", columns, worth.rows()[:most]))
