"""headwise corpus: statistics of the synthetic language."""

import json
from typing import Annotated

import typer

from headwise.cli.shell.common_options import JsonOption


def run(
    documents: Annotated[int, typer.Option(help="Number of documents to measure.")] = 2000,
    split: Annotated[
        str, typer.Option(help="Split: train, or held-out (word pairs that do not occur in training).")
    ] = "train",
    seed: Annotated[int, typer.Option(help="Seed of the document generator.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Show the relations of the synthetic language, the accuracy of the best fixed offset for each, and a document."""
    from rich.console import Console
    from rich.text import Text

    from headwise.text.synthetic import describe_language
    from headwise.ui.terminal_table import make_table

    rows, document = describe_language(documents, split, seed)
    if as_json:
        relations = [row._asdict() for row in rows]
        print(json.dumps({"split": split, "seed": seed, "relations": relations, "document": document.text}, indent=2))
        return
    columns = ["relation", "arcs", "best offset", "accuracy", "maximum", "example"]
    console = Console()
    console.print(
        make_table(
            f"Relations in {documents:,} documents ({split}), and the accuracy of the best fixed offset", columns, rows
        )
    )
    console.print(Text(document.text))
