"""What came of a training run, in the terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console

from headwise.analysis.roles.head_history import MetricEmergence
from headwise.training.synthetic_evaluation import ClozeScore
from headwise.ui.terminal_table import make_table


def show_train_result(
    result: dict[str, Any], probe_scores: tuple[ClozeScore, ...], trajectories: list[MetricEmergence]
) -> None:
    """How a run ended (`Trained.to_dict`), its exam, the best heads, and what to do next."""
    console = Console()
    held_out = "" if result["valid_loss"] is None else f", held out {result['valid_loss']:.4f}"
    console.print(
        f"{result['stop_reason']} at step {result['steps']}, {result['tokens']:,} tokens, {result['seconds']:.0f} s, "
        f"{result['parameters']:,} parameters: loss {result['loss'] or float('nan'):.4f}{held_out}",
        highlight=False,
    )
    if probe_scores:
        columns = ["probe", "questions", "right", "chance", "bigram"]
        console.print(make_table("The right word is the first choice, on held-out documents", columns, probe_scores))
    if trajectories:
        rows = [
            (*trajectory[:5], "" if trajectory.half_step is None else trajectory.half_step)
            for trajectory in trajectories
        ]
        title = "The best head of each measure; the baseline is the best of any head before the first step"
        console.print(make_table(title, ["measure", "head", "value", "baseline", "cases", "half of it at step"], rows))
    run_folder = Path(result["model"]).parent
    resume_command = result.get("command", f"headwise train --resume {run_folder}")
    done_message = f"the model is in {run_folder}: headwise generate {run_folder} ..."
    console.print(
        f"to go on: {resume_command}" if result["stop_reason"] == "interrupted" else done_message,
        highlight=False,
        soft_wrap=True,
    )
