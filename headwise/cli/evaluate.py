"""headwise evaluate: tasks of the lm-evaluation-harness and local tasks."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.shell import completion
from headwise.cli.shell.common_options import DeviceOption, DtypeOption, JsonOption, ModelArgument
from headwise.cli.shell.steering_options import SteeringOption, StrengthOption, load_steerings

if TYPE_CHECKING:
    from headwise.analysis.evaluation.evaluate import EvaluationResult


def run(
    model: ModelArgument,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="minimal_pairs, a text file (.txt) for perplexity, or a task of lm_eval. Repeat for more. Default: "
            "minimal_pairs."
        ),
    ] = None,
    silence: Annotated[
        str | None,
        typer.Option(help="Heads to silence in MODEL: 5.1 or 5.*.", autocompletion=completion.complete_heads),
    ] = None,
    steering: SteeringOption = None,
    strength: StrengthOption = None,
    reference: Annotated[str | None, typer.Option(help="Model to compare with on the same items.")] = None,
    max_items: Annotated[
        int | None, typer.Option(help="Maximum number of items per task. Default: all.", min=1)
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(help="Number of examples in each prompt. Default: that of the task.", min=0)
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="Folder with task files (.yaml) of your own. They may run code.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(help="Maximum number of tokens per batch.", min=1)] = 4096,
    max_length: Annotated[
        int | None,
        typer.Option(help="Maximum number of tokens read at once. Default: the context of the model.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of few-shot examples and bootstrap.")] = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on tasks, with 95% intervals, and compare it with another model on the same items."""
    from headwise.analysis.evaluation.evaluate import EvaluationResult, evaluate
    from headwise.model import ModelProtocol
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    loaded = load(model, device=device, dtype=dtype)
    task_names = tasks or ["minimal_pairs"]
    if silence is not None:
        loaded.heads[silence]  # an unknown address raises before the work starts
    steerings = load_steerings(steering, strength)
    for item in steerings:
        item.check_model(loaded)
    with show_progress(transient=True) as progress, ExitStack() as stack:

        def run_tasks(evaluated: ModelProtocol, compared: EvaluationResult | None = None) -> EvaluationResult:
            return evaluate(
                evaluated, task_names, reference=compared, max_items=max_items, num_fewshot=num_fewshot,
                include_path=include_path, batch_tokens=batch_tokens, max_length=max_length, seed=seed, progress=progress,
            )  # fmt: skip

        other = None
        if reference is not None:
            other = run_tasks(loaded if reference == model else load(reference, device=device, dtype=dtype))
        if silence is not None:
            stack.enter_context(loaded.heads[silence].silenced())
        for item in steerings:
            stack.enter_context(item.applied(loaded))
        result = run_tasks(loaded, other)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _print(result)


def _print(result: "EvaluationResult") -> None:
    from rich.console import Console

    from headwise.ui.terminal_table import make_table

    console = Console()
    if result.differences:
        difference_rows = [
            (item.task, item.metric, item.value, item.reference, item.difference, item.low, item.high, item.items)
            for item in result.differences
        ]
        columns = ["task", "metric", "value", "reference", "difference", "low", "high", "items"]
        title = "Difference to the reference, with its 95% paired bootstrap interval over items"
        console.print(make_table(title, columns, difference_rows))
    rows = [(item.task, item.metric, item.value, item.low, item.high, item.items) for item in result.metrics]
    title = "Results with 95% bootstrap intervals over items"
    console.print(make_table(title, ["task", "metric", "value", "low", "high", "items"], rows))
    for item in result.metrics:
        if item.by_group:
            title = f"{item.metric} of {item.task} by group"
            console.print(
                make_table(title, ["group", item.metric], sorted(item.by_group.items(), key=lambda row: row[1]))
            )
