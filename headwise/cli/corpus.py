"""headwise corpus: the little language, measured."""

import json
from typing import Annotated

import typer

from headwise.cli.shell.common_options import Json


def run(
    documents: Annotated[int, typer.Option(help="How many documents to measure.")] = 2000,
    split: Annotated[str, typer.Option(help="train, or held-out: word pairs that training never has.")] = "train",
    seed: Annotated[int, typer.Option(help="Another seed, other documents.")] = 0,
    as_json: Json = False,
) -> None:
    """Show the little language: how far one fixed offset gets with each relation, examples, and a document."""
    from rich.console import Console
    from rich.text import Text

    from headwise.text.synthetic import describe
    from headwise.ui.tables import make_table

    rows, document = describe(documents, split, seed)
    if as_json:
        relations = [row._asdict() for row in rows]
        print(json.dumps({"split": split, "seed": seed, "relations": relations, "document": document.text}, indent=2))
        return
    columns = ["relation", "arcs", "best offset", "share", "limit", "example"]
    console = Console()
    console.print(make_table(f"Relations in {documents:,} documents, {split}", columns, rows))
    console.print(Text(document.text))
