"""headwise importance: what every head is worth."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import CorpusArgument, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    corpus: CorpusArgument = None,
    source: Annotated[
        Path | None, typer.Option(help="What an encoder-decoder reads; CORPUS has its answers, line by line.")
    ] = None,
    heads: Annotated[
        str, typer.Option(help="Which heads: 5.1, 5.*, 0-3.*", autocompletion=completion.complete_heads)
    ] = "*",
    ranking: Annotated[str, typer.Option(help="ablation (exact), gradient or attribution (quick).")] = "ablation",
    ablation: Annotated[str, typer.Option(help="What stands in for a head: mean, zero or resample.")] = "mean",
    metric: Annotated[str, typer.Option(help="loss (all tokens) or last (the last one).")] = "loss",
    max_length: Annotated[int | None, typer.Option(help="Tokens of a unit of plain text.")] = None,
    max_texts: Annotated[
        int, typer.Option(help="At most so many texts; a long one is cut, and each piece counts.")
    ] = 32,
    max_rows: Annotated[int, typer.Option(help="How many heads to show.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Take heads away one by one and say what the model loses, with intervals."""
    from dataclasses import fields

    from rich.console import Console

    from headwise.analysis.ablation.head_outputs import eval_corpus
    from headwise.analysis.ablation.importance import HeadImportance, importance
    from headwise.text.corpus import Corpus
    from headwise.ui.progress import show_progress
    from headwise.ui.terminal_table import make_table
    from headwise.weights import load

    loaded = load(model)
    tokenized = eval_corpus(loaded, Corpus.from_cli_arguments(corpus, source), max_length).first(max_texts)
    with show_progress() as progress:
        result = importance(
            loaded, tokenized, ranking=ranking, ablation=ablation, heads=heads, metric=metric,  # pyright: ignore[reportArgumentType]
            progress=progress,
        )  # fmt: skip
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    columns = [field.name.replace("_", " ") for field in fields(HeadImportance)]
    Console().print(
        make_table(f"What the model loses without a head, by {ranking}", columns, result.table_rows()[:max_rows])
    )
