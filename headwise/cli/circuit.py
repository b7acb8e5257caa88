"""headwise circuit: the set of heads and MLPs that carries a task."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.shell.common_options import DeviceOption, DtypeOption, JsonOption, ModelArgument


def run(
    model: ModelArgument,
    task: Annotated[
        str,
        typer.Argument(
            help="Task: induction, indirect-object, agreement, greater-than, brackets, key-value, successor, or a JSON Lines "
            "file with clean, corrupted, right, wrong and template."
        ),
    ],
    size: Annotated[
        int | None,
        typer.Option(
            help="Number of nodes. Default: the smallest size that reaches the target on the size split.", min=1
        ),
    ] = None,
    random_sets: Annotated[
        int, typer.Option(help="Number of random sets, matched by size, kind and layer.", min=0)
    ] = 99,
    num_prompts: Annotated[
        int | None, typer.Option(help="Number of prompts. Default: 80, or all prompts of a file.", min=1)
    ] = None,
    ranking: Annotated[
        str, typer.Option(help="Ranking method: exact, attribution, eap-ig (integrated gradients) or gates.")
    ] = "exact",
    ig_steps: Annotated[int, typer.Option(help="Number of inputs of eap-ig.", min=1)] = 5,
    target: Annotated[float, typer.Option(help="Faithfulness that the size must reach on the size split.")] = 0.85,
    min_accuracy: Annotated[
        float, typer.Option(help="Share of prompts that the model must answer correctly.", min=0, max=1)
    ] = 0.7,
    alternative: Annotated[bool, typer.Option(help="Search again without the heads of the circuit.")] = True,
    edges: Annotated[
        int, typer.Option(help="Number of members, best first, between which edges are measured.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of words, splits, random sets and bootstrap.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="File of finished steps. Run the same command again to resume.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the result: .json, or .csv with one line per node.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a figure of faithfulness over sizes (.png, .svg, .pdf) or its data (.csv, .json)."),
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(help="Write the graph by layers (.png, .svg, .pdf) or its edges (.csv, .json)."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the result as a self-contained page, such as circuit.html.")
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Maximum number of members to show, best first.")] = 20,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the circuit of a task: ranked, sized and judged on three disjoint sets of prompts."""
    import json

    from rich.console import Console

    from headwise.analysis.circuits.find_circuit import find_circuit
    from headwise.ui.circuit_text import circuit_parts
    from headwise.ui.figures.circuit_plot import draw_circuit_graph, draw_faithfulness_curves
    from headwise.ui.figures.figure_with_data import check_path
    from headwise.ui.progress import resume_hint_on_interrupt, show_progress
    from headwise.weights import load

    for path, suffixes in ((plot, None), (graph, None), (save, (".json", ".csv")), (report, (".html",))):
        if path is not None:
            check_path(path, *(() if suffixes is None else (suffixes,)))
    loaded = load(model, device=device, dtype=dtype)
    with resume_hint_on_interrupt() if out is not None else nullcontext(), show_progress(transient=True) as progress:
        result = find_circuit(
            loaded, task, size, random_sets, num_prompts, ranking=ranking, ig_steps=ig_steps, target=target,
            min_accuracy=min_accuracy, alternative=alternative, edges=edges, seed=seed, out=out, progress=progress,
        )  # fmt: skip
    if save is not None:
        (result.to_csv if save.suffix == ".csv" else result.to_json)(save)
    if plot is not None:
        draw_faithfulness_curves(result).save(plot)
    if graph is not None:
        draw_circuit_graph(result).save(graph)
    if report is not None:
        result.report(report)
    if as_json:
        print(json.dumps(result.to_dict(), indent=1))
        return
    for part in circuit_parts(result, max_rows):
        Console().print(part, markup=False, highlight=False)
