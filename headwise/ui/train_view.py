"""What came of a training run, in the terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console

from headwise.analysis.roles.history import Life
from headwise.training.synthetic_eval import Mark
from headwise.ui.tables import make_table


def show_run(result: dict[str, Any], marks: tuple[Mark, ...], lives: list[Life]) -> None:
    """How a run ended (`Trained.to_dict`), its exam, the best heads, and what to do next."""
    console = Console()
    held_out = "" if result["valid_loss"] is None else f", held out {result['valid_loss']:.4f}"
    console.print(
        f"{result['stopped']} at step {result['steps']}, {result['tokens']:,} tokens, {result['seconds']:.0f} s, "
        f"{result['parameters']:,} parameters: loss {result['loss'] or float('nan'):.4f}{held_out}",
        highlight=False,
    )
    if marks:
        columns = ["quiz", "questions", "right", "chance", "bigram"]
        console.print(make_table("The right word is the first choice, on held-out documents", columns, marks))
    if lives:
        rows = [(*life[:5], "" if life.half_at is None else life.half_at) for life in lives]
        title = "The best head of each measure; the baseline is the best of any head before the first step"
        console.print(make_table(title, ["measure", "head", "value", "baseline", "cases", "half of it at step"], rows))
    run = Path(result["model"]).parent
    on = result.get("again", f"headwise train --resume {run}")
    ended = f"the model is in {run}: headwise generate {run} ..."
    console.print(f"to go on: {on}" if result["stopped"] == "interrupted" else ended, highlight=False, soft_wrap=True)
