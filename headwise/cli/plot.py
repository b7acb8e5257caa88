"""headwise plot: a figure of a model's heads, or the numbers in it."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell.common_options import CorpusArgument

if TYPE_CHECKING:
    from headwise.ui.figures.figure_io import FigureWithData

# What can be drawn, and what it is drawn from.
FIGURE_KINDS = {
    "roles": "the grid of heads with their roles; from a model, or a profile saved by headwise profile --save",
    "offsets": "attention by distance; likewise",
    "depth": "metrics from the first layer to the last; likewise",
    "embedding": "heads as far apart as they are in where they look; from a model",
    "clusters": "the tree of heads that look at the same; from a model",
    "history": "a metric of every head over training; from a run of headwise train --watch-heads, or its heads.npz",
    "pruning": "loss against the share of heads kept; from a model",
    "tradeoff": "loss against anything; from a .csv or .json of rows with x, mean and perhaps low, high, line",
    "diagram": "how the heads of a layer stand beside each other; from a preset or a model",
}
KINDS_HELP = "; ".join(f"{kind}: {description.split(';')[0]}" for kind, description in FIGURE_KINDS.items())


def run(
    kind: Annotated[str, typer.Argument(help=f"One of: {KINDS_HELP}.")],
    model_or_file: Annotated[str, typer.Argument(help="A model, a saved profile, or what the figure is drawn from.")],
    corpus: CorpusArgument = None,
    out: Annotated[Path, typer.Option(help="A picture: .png, .svg, .pdf; or its numbers: .csv, .json")] = Path(
        "heads.png"
    ),
    heads: Annotated[
        str | None, typer.Option(help="offsets, embedding, clusters: these heads only, 5.1 or 0-3.*")
    ] = None,
    metrics: Annotated[list[str] | None, typer.Option(help="depth, history: this metric; may be given again.")] = None,
    causal: Annotated[bool, typer.Option(help="Test roles causally, by ablations, when a profile is made.")] = False,
    max_texts: Annotated[
        int, typer.Option(help="pruning: at most so many texts; each piece of a long one counts.")
    ] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figure's numbers as JSON.")] = False,
) -> None:
    """Draw a figure and write it to a file."""
    from headwise.errors import HeadwiseError, suggest_names
    from headwise.ui.figures.figure_io import check_path

    if kind not in FIGURE_KINDS:
        raise HeadwiseError(f"there is no figure {kind!r}; {suggest_names(kind, FIGURE_KINDS)}")
    check_path(out)
    corpus_input: Any = None if not corpus else corpus[0] if len(corpus) == 1 else [Path(item) for item in corpus]
    draw_functions: dict[str, Callable[[], FigureWithData]] = {
        "roles": lambda: _load_profile(model_or_file, corpus_input, causal).plot.roles(),
        "offsets": lambda: _load_profile(model_or_file, corpus_input, causal).plot.offsets(heads),
        "depth": lambda: _draw_depth(model_or_file, corpus_input, causal, metrics),
        "embedding": lambda: _draw_comparison(kind, model_or_file, corpus_input, heads),
        "clusters": lambda: _draw_comparison(kind, model_or_file, corpus_input, heads),
        "history": lambda: _draw_history(model_or_file, metrics),
        "pruning": lambda: _draw_pruning(model_or_file, corpus_input, max_texts),
        "tradeoff": lambda: _draw_tradeoff(model_or_file),
        "diagram": lambda: _draw_diagram(model_or_file),
    }
    figure = draw_functions[kind]()
    figure.save(out)
    print(json.dumps({"out": str(out), "rows": figure.as_records()}, indent=2) if as_json else f"{kind}: {out}")


def _load_profile(model_or_file: str, corpus: Any, causal: bool) -> Any:
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    if model_or_file.endswith(".npz"):
        return Profile.load(model_or_file)
    with show_progress() as progress:
        return profile(load(model_or_file), corpus, causal=causal, progress=progress)


def _draw_depth(model_or_file: str, corpus: Any, causal: bool, metrics: list[str] | None) -> "FigureWithData":
    profile = _load_profile(model_or_file, corpus, causal)
    return profile.plot.depth(metrics) if metrics else profile.plot.depth()


def _draw_comparison(kind: str, model_or_file: str, corpus: Any, heads: str | None) -> "FigureWithData":
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.similarity.compare_heads import compare_heads
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    model = load(model_or_file)
    comparison = compare_heads(model, corpus, heads="*" if heads is None else heads)
    with show_progress() as progress:
        result = profile(model, corpus, causal=False, progress=progress)
    return result.plot.embedding(comparison) if kind == "embedding" else result.plot.clusters(comparison)


def _draw_history(run_or_file: str, metrics: list[str] | None) -> "FigureWithData":
    from headwise.analysis.roles.head_history import HeadHistory
    from headwise.ui.figures.training_history import draw_history

    path = Path(run_or_file)
    history = HeadHistory.load(path / "heads.npz" if path.is_dir() else path)
    return draw_history(history, *(metrics or [])[:1])


def _draw_pruning(model_name: str, corpus: Any, max_texts: int) -> "FigureWithData":
    from headwise.analysis.ablation.head_outputs import eval_corpus
    from headwise.compression.pruning_curve import pruning_curve
    from headwise.ui.figures.tradeoff_curves import draw_pruning
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    model = load(model_name)
    selection_corpus, test_corpus = eval_corpus(model, corpus).first(max_texts).halves()
    with show_progress() as progress:
        return draw_pruning(pruning_curve(model, selection_corpus, test_corpus, progress=progress))


def _draw_tradeoff(data_path: str) -> "FigureWithData":
    from headwise.ui.figures.tradeoff_curves import draw_tradeoff

    return draw_tradeoff(_read_rows(data_path), xlabel="x")


def _draw_diagram(model_or_preset: str) -> "FigureWithData":
    from headwise.spec import preset, presets
    from headwise.ui.figures.diagram import draw_attention_diagram
    from headwise.weights import load

    return draw_attention_diagram(
        preset(model_or_preset) if model_or_preset in presets() else load(model_or_preset).spec
    )


def _read_rows(data_path: str) -> Any:
    """Rows of a .csv or .json, numbers as numbers."""
    from headwise.errors import HeadwiseError

    path = Path(data_path)
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        if path.suffix == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                return [{name: _parse_number(value) for name, value in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError) as error:
        raise HeadwiseError(f"{data_path} could not be read ({error}); give a .csv or .json of rows.") from None
    raise HeadwiseError(f"a curve is drawn from a .csv or .json of rows; got {data_path!r}.")


def _parse_number(value: str) -> float | str | None:
    try:
        return float(value)
    except ValueError:
        return value or None
