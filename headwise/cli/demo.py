"""headwise demo: a small decoder, a sentence, a table of its heads."""

import json
from dataclasses import asdict
from typing import Annotated

import typer


def run(
    sentence: Annotated[
        str | None, typer.Argument(help="What the model reads; left out: the guide's own sentence.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the random weights.", min=0, max=2**63 - 1)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Build a small decoder, run a sentence, and show each of its heads and the kernel that ran."""
    from rich.console import Console

    from headwise.show.demo import SENTENCE, HeadRow, demo
    from headwise.show.tables import make_table

    result = demo(SENTENCE if sentence is None else sentence, seed)
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return
    console = Console()
    console.print(
        f"A decoder of {result.parameters:,} parameters, random weights, reads: {result.sentence}", style="bold"
    )
    console.print(f"Kernel: {result.kernel} ({result.because}).")
    nothing = "bitwise the same" if result.looking_changed_nothing else "CHANGED"
    console.print(f"Looking at all heads left the outputs {nothing}.")
    titles = {
        "head": "head", "looks_at": "last byte looks at", "weight": "weight", "entropy": "entropy (nats)",
        "write": "‖write‖", "effect": "effect if silenced",
    }  # fmt: skip
    rows = [[getattr(row, field) for field in HeadRow.__dataclass_fields__] for row in result.heads]
    console.print(make_table("Heads", [titles[field] for field in HeadRow.__dataclass_fields__], rows))
