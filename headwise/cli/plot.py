"""headwise plot: figures of the heads of a model, or their data."""

import csv
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell.common_options import CorpusArgument, DeviceOption, DtypeOption

if TYPE_CHECKING:
    from headwise.model import ModelProtocol
    from headwise.ui.figures.figure_with_data import FigureWithData

    LoadModel = Callable[[], ModelProtocol]

# Figures and the input of each.
FIGURE_KINDS = {
    "roles": "grid of all heads with their roles; from a model or a profile saved by headwise profile --save",
    "offsets": "attention by distance; from a model or a saved profile",
    "depth": "metrics by layer; from a model or a saved profile",
    "embedding": "heads in two dimensions, by the distance between their attention maps; from a model",
    "clusters": "hierarchical clustering of heads by their attention maps; from a model",
    "history": "a metric of every head over training; from a run of headwise train --watch-heads or its heads.npz",
    "pruning": "loss by fraction of remaining heads; from a model",
    "tradeoff": "any curve with intervals; from a .csv or .json with columns x, mean and optionally low, high, line",
    "diagram": "the heads of a layer and their matrices; from a preset or a model",
}
KINDS_HELP = "; ".join(f"{kind}: {description.split(';')[0]}" for kind, description in FIGURE_KINDS.items())


def run(
    kind: Annotated[str, typer.Argument(help=f"Kind of figure. {KINDS_HELP}.")],
    model_or_file: Annotated[str, typer.Argument(help="Model, saved profile, or data file of the figure.")],
    corpus: CorpusArgument = None,
    out: Annotated[Path, typer.Option(help="Output file: figure (.png, .svg, .pdf) or data (.csv, .json).")] = Path(
        "heads.png"
    ),
    heads: Annotated[
        str | None, typer.Option(help="For offsets, embedding, clusters: heads to draw, 5.1 or 0-3.*. Default: all.")
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option(help="For depth, history: metric to draw. Repeat the option for several.")
    ] = None,
    causal: Annotated[bool, typer.Option(help="Include causal tests if a profile is computed.")] = False,
    max_texts: Annotated[
        int,
        typer.Option(
            help="For pruning: maximum number of texts. Longer texts are split into chunks, each counted as a text."
        ),
    ] = 64,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the data of the figure as JSON.")] = False,
) -> None:
    """Draw a figure and write it to a file."""
    from headwise.errors import ArgumentError, suggest_names
    from headwise.ui.figures.figure_with_data import check_path

    if kind not in FIGURE_KINDS:
        raise ArgumentError(f"kind={kind!r}: unknown kind of figure; {suggest_names(kind, FIGURE_KINDS)}")
    check_path(out)
    corpus_input: Any = None if not corpus else corpus[0] if len(corpus) == 1 else [Path(item) for item in corpus]
    load_model = partial(_load_model, model_or_file, device, dtype)
    draw_functions: dict[str, Callable[[], FigureWithData]] = {
        "roles": lambda: _load_profile(model_or_file, load_model, corpus_input, causal).plot.roles(),
        "offsets": lambda: _load_profile(model_or_file, load_model, corpus_input, causal).plot.offsets(heads),
        "depth": lambda: _draw_depth(model_or_file, load_model, corpus_input, causal, metrics),
        "embedding": lambda: _draw_comparison(kind, load_model, corpus_input, heads),
        "clusters": lambda: _draw_comparison(kind, load_model, corpus_input, heads),
        "history": lambda: _draw_history(model_or_file, metrics),
        "pruning": lambda: _draw_pruning(load_model, corpus_input, max_texts),
        "tradeoff": lambda: _draw_tradeoff(model_or_file),
        "diagram": lambda: _draw_diagram(model_or_file, load_model),
    }
    figure = draw_functions[kind]()
    figure.save(out)
    print(json.dumps({"out": str(out), "rows": figure.as_records()}, indent=2) if as_json else f"{kind}: {out}")


def _load_model(name: str, device: str, dtype: str | None) -> "ModelProtocol":
    from headwise.weights import load

    return load(name, device=device, dtype=dtype)


def _load_profile(model_or_file: str, load_model: "LoadModel", corpus: Any, causal: bool) -> Any:
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.ui.progress import show_progress

    if model_or_file.endswith(".npz"):
        return Profile.load(model_or_file)
    with show_progress() as progress:
        return profile(load_model(), corpus, causal=causal, progress=progress)


def _draw_depth(
    model_or_file: str, load_model: "LoadModel", corpus: Any, causal: bool, metrics: list[str] | None
) -> "FigureWithData":
    profile = _load_profile(model_or_file, load_model, corpus, causal)
    return profile.plot.depth(metrics) if metrics else profile.plot.depth()


def _draw_comparison(kind: str, load_model: "LoadModel", corpus: Any, heads: str | None) -> "FigureWithData":
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.similarity.compare_heads import compare_heads
    from headwise.ui.progress import show_progress

    model = load_model()
    comparison = compare_heads(model, corpus, heads="*" if heads is None else heads)
    with show_progress() as progress:
        result = profile(model, corpus, causal=False, progress=progress)
    return result.plot.embedding(comparison) if kind == "embedding" else result.plot.clusters(comparison)


def _draw_history(run_or_file: str, metrics: list[str] | None) -> "FigureWithData":
    from headwise.analysis.roles.head_history import HeadHistory
    from headwise.ui.figures.head_history_plots import draw_history

    path = Path(run_or_file)
    history = HeadHistory.load(path / "heads.npz" if path.is_dir() else path)
    return draw_history(history, *(metrics or [])[:1])


def _draw_pruning(load_model: "LoadModel", corpus: Any, max_texts: int) -> "FigureWithData":
    from headwise.analysis.ablation.recorded_head_outputs import eval_corpus
    from headwise.compression.pruning_curve import pruning_curve
    from headwise.ui.figures.tradeoff_curves import draw_pruning
    from headwise.ui.progress import show_progress

    model = load_model()
    selection_corpus, test_corpus = eval_corpus(model, corpus).first(max_texts).halves()
    with show_progress() as progress:
        return draw_pruning(pruning_curve(model, selection_corpus, test_corpus, progress=progress))


def _draw_tradeoff(data_path: str) -> "FigureWithData":
    from headwise.ui.figures.tradeoff_curves import draw_tradeoff

    return draw_tradeoff(_read_rows(data_path), xlabel="x")


def _draw_diagram(model_or_preset: str, load_model: "LoadModel") -> "FigureWithData":
    from headwise.spec import preset, presets
    from headwise.ui.figures.diagram import draw_attention_diagram

    return draw_attention_diagram(preset(model_or_preset) if model_or_preset in presets() else load_model().spec)


def _read_rows(data_path: str) -> Any:
    """Read the rows of a .csv or .json file and convert numbers."""
    from headwise.errors import FileFormatError

    path = Path(data_path)
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        if path.suffix == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                return [{name: _parse_number(value) for name, value in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError) as error:
        raise FileFormatError(
            f"{data_path}: cannot read the file ({error}). Use a .csv or .json file of rows."
        ) from None
    raise FileFormatError(
        f"{data_path}: not a .csv or .json file. Use a .csv or .json file whose rows have the columns `x` and `mean`."
    )


def _parse_number(value: str) -> float | str | None:
    try:
        return float(value)
    except ValueError:
        return value or None
