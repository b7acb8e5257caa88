"""headwise plot: a figure of a model's heads, or the numbers in it."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.shell.common_options import Texts

if TYPE_CHECKING:
    from headwise.ui.figures.figure_io import Drawing

# What can be drawn, and what it is drawn from.
KINDS = {
    "roles": "the grid of heads with their roles; from a model, or a profile saved by headwise heads --save",
    "offsets": "attention by distance; likewise",
    "depth": "measures from the first layer to the last; likewise",
    "map": "heads as far apart as they are in where they look; from a model",
    "clusters": "the tree of heads that look at the same; from a model",
    "lives": "a measure of every head over training; from a run of headwise train --watch-heads, or its heads.npz",
    "pruning": "loss against the share of heads kept; from a model",
    "tradeoff": "loss against anything; from a .csv or .json of rows with x, mean and perhaps low, high, line",
    "diagram": "how the heads of a layer stand beside each other; from a preset or a model",
}
LISTED = "; ".join(f"{kind}: {told.split(';')[0]}" for kind, told in KINDS.items())


def run(
    what: Annotated[str, typer.Argument(help=f"One of: {LISTED}.")],
    source: Annotated[str, typer.Argument(help="A model, a saved profile, or what the figure is drawn from.")],
    text: Texts = None,
    out: Annotated[Path, typer.Option(help="A picture: .png, .svg, .pdf; or its numbers: .csv, .json")] = Path(
        "heads.png"
    ),
    heads: Annotated[str | None, typer.Option(help="offsets, map, clusters: these heads only, 5.1 or 0-3.*")] = None,
    measure: Annotated[list[str] | None, typer.Option(help="depth, lives: this measure; may be given again.")] = None,
    causal: Annotated[bool, typer.Option(help="Climb the last rung, by ablations, when a profile is made.")] = False,
    limit: Annotated[int, typer.Option(help="pruning: at most so many texts; each piece of a long one counts.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figure's numbers as JSON.")] = False,
) -> None:
    """Draw a figure and write it to a file."""
    from headwise.errors import HeadwiseError, close_names
    from headwise.ui.figures.figure_io import check_path

    if what not in KINDS:
        raise HeadwiseError(f"there is no figure {what!r}; {close_names(what, KINDS)}")
    check_path(out)
    corpus: Any = None if not text else text[0] if len(text) == 1 else [Path(one) for one in text]
    makers: dict[str, Callable[[], Drawing]] = {
        "roles": lambda: _profile(source, corpus, causal).plot.roles(),
        "offsets": lambda: _profile(source, corpus, causal).plot.offsets(heads),
        "depth": lambda: _depth(source, corpus, causal, measure),
        "map": lambda: _between(what, source, corpus, heads),
        "clusters": lambda: _between(what, source, corpus, heads),
        "lives": lambda: _lives(source, measure),
        "pruning": lambda: _pruning(source, corpus, limit),
        "tradeoff": lambda: _tradeoff(source),
        "diagram": lambda: _diagram(source),
    }
    drawn = makers[what]()
    drawn.save(out)
    print(json.dumps({"out": str(out), "rows": drawn.as_records()}, indent=2) if as_json else f"{what}: {out}")


def _profile(source: str, corpus: Any, causal: bool) -> Any:
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    if source.endswith(".npz"):
        return Profile.load(source)
    with show_progress() as progress:
        return profile(load(source), corpus, causal=causal, progress=progress)


def _depth(source: str, corpus: Any, causal: bool, measures: list[str] | None) -> "Drawing":
    made = _profile(source, corpus, causal)
    return made.plot.depth(measures) if measures else made.plot.depth()


def _between(what: str, source: str, corpus: Any, heads: str | None) -> "Drawing":
    from headwise.analysis.roles.profile import profile
    from headwise.analysis.similarity.compare_heads import compare
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    model = load(source)
    compared = compare(model, corpus, heads="*" if heads is None else heads)
    with show_progress() as progress:
        made = profile(model, corpus, causal=False, progress=progress)
    return made.plot.map(compared) if what == "map" else made.plot.clusters(compared)


def _lives(source: str, measures: list[str] | None) -> "Drawing":
    from headwise.analysis.roles.history import HeadHistory
    from headwise.ui.figures.training_history import draw_lives

    path = Path(source)
    made = HeadHistory.load(path / "heads.npz" if path.is_dir() else path)
    return draw_lives(made, *(measures or [])[:1])


def _pruning(source: str, corpus: Any, limit: int) -> "Drawing":
    from headwise.analysis.ablation.head_outputs import read_on
    from headwise.compression.curve import curve
    from headwise.ui.figures.tradeoff import draw_pruning
    from headwise.ui.progress import show_progress
    from headwise.weights import load

    model = load(source)
    choosing, judging = read_on(model, corpus).first(limit).halves()
    with show_progress() as progress:
        return draw_pruning(curve(model, choosing, judging, progress=progress))


def _tradeoff(source: str) -> "Drawing":
    from headwise.ui.figures.tradeoff import draw_tradeoff

    return draw_tradeoff(_read(source), x="x")


def _diagram(source: str) -> "Drawing":
    from headwise.spec import preset, presets
    from headwise.ui.figures.diagram import draw_diagram
    from headwise.weights import load

    return draw_diagram(preset(source) if source in presets() else load(source).spec)


def _read(source: str) -> Any:
    """Rows of a .csv or .json, numbers as numbers."""
    from headwise.errors import HeadwiseError

    path = Path(source)
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        if path.suffix == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                return [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError) as error:
        raise HeadwiseError(f"{source} could not be read ({error}); give a .csv or .json of rows.") from None
    raise HeadwiseError(f"a curve is drawn from a .csv or .json of rows; got {source!r}.")


def _number(value: str) -> float | str | None:
    try:
        return float(value)
    except ValueError:
        return value or None
