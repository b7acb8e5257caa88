"""A drawing: a picture and the numbers it shows. Made without a display; written as a picture or as data, by the suffix."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.io.atomic_write import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGE_SUFFIXES, DATA_SUFFIXES = (".svg", ".png", ".pdf"), (".csv", ".json")
TEXT_COLOR, MUTED_COLOR, BACKGROUND = "#22262b", "#9aa1a9", "#ffffff"
LINE_COLORS = ("#1f6fb4", "#c2571a", "#2f8a4d", "#8a4fa3", "#a8324a", "#6b7a1f")  # dark enough for thin lines on white
DPI = 160  # dots an inch
DATE_METADATA = {".svg": "Date", ".pdf": "CreationDate"}  # left out, so that the same picture is the same file


@dataclass(frozen=True, eq=False)
class FigureWithData:
    """`figure` is matplotlib's own, `rows` are the numbers in it. `save("a.svg")` writes a picture, `save("a.csv")` data.

    >>> figure = FigureWithData(make_figure(3, 2), [{"head": "5.1", "entropy": 1.5}])
    >>> print(figure.as_csv(), end="")
    head,entropy
    5.1,1.5
    """

    figure: "Figure"
    rows: list[dict[str, Any]]

    def save(self, path: str | Path) -> Path:
        """Write a picture (.svg, .png, .pdf) or the numbers (.csv, .json), whole or not at all."""
        path = check_path(path)
        suffix = path.suffix.lower()
        if suffix == ".csv":
            return write_atomic(path, self.as_csv().encode())
        if suffix == ".json":
            return write_atomic(path, json.dumps(self.as_records(), indent=1).encode())
        return write_atomic(path, self.as_image(suffix))

    def as_image(self, suffix: str) -> bytes:
        """The picture in one of the formats, `.svg`."""
        from matplotlib import rc_context

        buffer = BytesIO()
        with rc_context({"svg.hashsalt": "headwise"}):
            metadata = {DATE_METADATA[suffix]: None} if suffix in DATE_METADATA else None
            self.figure.savefig(buffer, format=suffix.removeprefix("."), dpi=DPI, metadata=metadata)
        return buffer.getvalue()

    def as_csv(self) -> str:
        """The numbers, a line each."""
        buffer = StringIO()
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        writer = csv.DictWriter(buffer, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.as_records())
        return buffer.getvalue()

    def as_records(self) -> list[dict[str, Any]]:
        """The numbers as JSON knows them: what is not known is None."""
        return [
            {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in row.items()}
            for row in self.rows
        ]

    def _repr_png_(self) -> bytes:
        return self.as_image(".png")


def check_path(path: str | Path, suffixes: Sequence[str] = (*IMAGE_SUFFIXES, *DATA_SUFFIXES)) -> Path:
    """Whether a drawing can be written there; asked before long work."""
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise HeadwiseError(f"a picture is written as {', '.join(suffixes)}; got {str(path)!r}.")
    if not path.parent.is_dir():
        raise HeadwiseError(f"there is no folder {path.parent} to write {path.name} into; make it first.")
    return path


def make_figure(width: float, height: float) -> "Figure":
    """An empty sheet, so many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=BACKGROUND, layout="constrained")


def style_axes(axes: "Axes", x: str = "", y: str = "") -> None:
    """Two axes with their names, no box around."""
    axes.set_xlabel(x, fontsize=9, color=TEXT_COLOR)
    axes.set_ylabel(y, fontsize=9, color=TEXT_COLOR)
    axes.tick_params(labelsize=8, colors=TEXT_COLOR)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def escape_dollar(label: str) -> str:
    """A dollar sign begins a formula in matplotlib; here it is just a dollar sign."""
    return label.replace("$", r"\$")
