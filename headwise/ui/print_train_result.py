"""Terminal output of a training run."""

from pathlib import Path
from typing import Any

from rich.console import Console

from headwise.analysis.roles.head_history import MetricEmergence
from headwise.training.synthetic_evaluation import ClozeScore
from headwise.ui.terminal_table import make_table


def show_train_result(
    result: dict[str, Any], probe_scores: tuple[ClozeScore, ...], trajectories: list[MetricEmergence]
) -> None:
    """Print the end of a run (`TrainResult.to_dict`), its cloze probes, the best heads and the next command."""
    console = Console()
    held_out = "" if result["valid_loss"] is None else f", held-out loss {result['valid_loss']:.4f}"
    console.print(
        f"{result['stop_reason']} at step {result['steps']}: {result['tokens']:,} tokens, {result['seconds']:.0f} s, "
        f"{result['parameters']:,} parameters, training loss {result['loss'] or float('nan'):.4f}{held_out}",
        highlight=False,
    )
    if probe_scores:
        columns = ["probe", "cases", "accuracy", "chance", "bigram"]
        console.print(make_table("Accuracy on cloze probes of held-out documents", columns, probe_scores))
    if trajectories:
        rows = [
            (*trajectory[:5], "" if trajectory.half_step is None else trajectory.half_step)
            for trajectory in trajectories
        ]
        title = "Best head of each metric; baseline: best head before the first training step"
        console.print(
            make_table(title, ["metric", "best head", "value", "baseline", "cases", "step at half the value"], rows)
        )
    run_folder = Path(result["model"]).parent
    resume_command = result.get("command", f"headwise train --resume {run_folder}")
    done_message = f"Model saved in {run_folder}. Next: headwise generate {run_folder} ..."
    console.print(
        f"To resume: {resume_command}" if result["stop_reason"] == "interrupted" else done_message,
        highlight=False,
        soft_wrap=True,
    )
