"""The picture of a claim: lines where its figures were measured at numbers, bars where at names."""

from math import isfinite
from typing import TYPE_CHECKING

from headwise.errors import HeadwiseError
from headwise.experiments.engine.statistic import At, Figure
from headwise.experiments.head_sweep import Sweep
from headwise.experiments.run import Result
from headwise.ui.figures.figure_io import COLOURS, INK, Drawing, make_figure, safe, tidy
from headwise.ui.figures.tradeoff import draw_tradeoff

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def is_drawn(result: Result) -> bool:
    """Whether there is something to draw: on a given model some figures are not measured."""
    return any(_finite(result.figures.at(name)) for name in result.claim.picture.figures)


def draw_claim(result: Result) -> Drawing:
    """A claim's figures, with their intervals; the verdict stands above."""
    picture = result.claim.picture
    chosen = {name: some for name in picture.figures if (some := _finite(result.figures.at(name)))}
    if not chosen:
        raise HeadwiseError(
            f"{result.claim.name} has none of the figures its picture shows: {', '.join(picture.figures)}."
        )
    title = f"{result.claim.name}: {result.verdict.word}" + (" (one seed: indicative)" if result.indicative else "")
    if all(isinstance(at, int | float) for some in chosen.values() for at in some):
        rows = [
            {"line": name if len(chosen) > 1 else "", "x": at, "mean": f.mean, "low": f.low, "high": f.high}
            for name, some in chosen.items()
            for at, f in some.items()
        ]
        return draw_tradeoff(rows, picture.x, picture.y, title, log=picture.log)
    return _bars(chosen, picture.y, title)


def _finite(some: dict[At, Figure]) -> dict[At, Figure]:
    return {at: figure for at, figure in some.items() if isfinite(figure.mean)}


def draw_sweep(sweep: Sweep) -> Drawing:
    """The held-out loss against the number of heads, the interval over seeds as a band."""
    rows = [
        {"x": row.heads, "mean": row.loss.mean, "low": row.loss.low, "high": row.loss.high, "head_dim": row.head_dim}
        for row in sweep.rows
    ]
    told = f"width {sweep.width}, constant {sweep.constant}, {sweep.steps} steps, {sweep.seeds} seeds; band: 95 % over seeds"
    return draw_tradeoff(rows, "heads", "held-out loss, nats a token", told, log=True)


def draw_curves(sweep: Sweep) -> Drawing:
    """The held-out loss through training, a line for each model."""
    rows = [{"line": name, "x": p["step"], **p} for name, points in sweep.curves.items() for p in points]
    told = f"constant {sweep.constant}, {sweep.seeds} seeds; bands: 95 % over seeds"
    return draw_tradeoff(rows, "step", "held-out loss, nats a token", told)


def _bars(chosen: dict[str, dict[At, Figure]], y: str, title: str) -> Drawing:
    """A group of bars for each name measured at, one bar for each figure."""
    labels = list(dict.fromkeys(at for some in chosen.values() for at in some))
    figure = make_figure(max(5.0, min(11.0, 1.2 + 0.75 * len(labels) * max(1, len(chosen) / 2))), 4.2)
    panel = figure.subplots()
    thick = 0.8 / len(chosen)
    rows = []
    for i, (name, some) in enumerate(chosen.items()):
        for at, one in some.items():
            _bar(panel, labels.index(at) + (i - (len(chosen) - 1) / 2) * thick, thick, one, COLOURS[i % len(COLOURS)])
            rows.append({"figure": name, "at": at, "mean": one.mean, "low": one.low, "high": one.high})
        panel.bar([0], [0], color=COLOURS[i % len(COLOURS)], label=name)
    tidy(panel, "", y)
    long = max((len(str(label)) for label in labels), default=0) > 10
    told = [safe("" if label is None else str(label)) for label in labels]
    panel.set_xticks(range(len(labels)), labels=told, rotation=25 if long else 0, ha="right" if long else "center")
    panel.axhline(0, color=INK, linewidth=0.6)
    if len(chosen) > 1:
        panel.margins(y=0.2 + 0.06 * len(chosen))  # room for the names above the bars
        panel.legend(fontsize=8, frameon=False, loc="upper right", labelcolor=INK)
    panel.set_title(title, fontsize=8, color=INK, loc="left")
    return Drawing(figure, rows)


def _bar(panel: "Axes", x: float, thick: float, one: Figure, colour: str) -> None:
    panel.bar([x], [one.mean], thick * 0.92, color=colour)
    if one.low is not None and one.high is not None:
        panel.vlines([x], [one.low], [one.high], color=INK, linewidth=1)
