"""headwise corpus: the synthetic language, measured."""

import json
from typing import Annotated

import typer

from headwise.cli.shell.common_options import JsonOption


def run(
    documents: Annotated[int, typer.Option(help="How many documents to measure.")] = 2000,
    split: Annotated[str, typer.Option(help="train, or held-out: word pairs that training never has.")] = "train",
    seed: Annotated[int, typer.Option(help="Another seed, other documents.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show the synthetic language: how far one fixed offset gets with each relation, examples, and a document."""
    from rich.console import Console
    from rich.text import Text

    from headwise.text.synthetic import describe_language
    from headwise.ui.terminal_table import make_table

    rows, document = describe_language(documents, split, seed)
    if as_json:
        relations = [row._asdict() for row in rows]
        print(json.dumps({"split": split, "seed": seed, "relations": relations, "document": document.text}, indent=2))
        return
    columns = ["relation", "arcs", "best offset", "share", "limit", "example"]
    console = Console()
    console.print(make_table(f"Relations in {documents:,} documents, {split}", columns, rows))
    console.print(Text(document.text))
