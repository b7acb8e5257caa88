"""A figure with its data. It needs no display and is saved as an image or as data, by suffix."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO, StringIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import ArgumentError
from headwise.io.atomic_write import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IMAGE_SUFFIXES, DATA_SUFFIXES = (".svg", ".png", ".pdf"), (".csv", ".json")
TEXT_COLOR, MUTED_COLOR, BACKGROUND = "#22262b", "#9aa1a9", "#ffffff"
LINE_COLORS = ("#1f6fb4", "#c2571a", "#2f8a4d", "#8a4fa3", "#a8324a", "#6b7a1f")  # readable as thin lines on white
DPI = 160
DATE_METADATA = {".svg": "Date", ".pdf": "CreationDate"}  # removed, so that equal figures are equal files


@dataclass(frozen=True, eq=False)
class FigureWithData:
    """A matplotlib figure and its data. `save("a.svg")` writes an image, `save("a.csv")` the data.

    Attributes:
        figure: The matplotlib figure.
        rows: The plotted data, one dict per row.

    >>> figure = FigureWithData(make_figure(3, 2), [{"head": "5.1", "entropy": 1.5}])
    >>> print(figure.as_csv(), end="")
    head,entropy
    5.1,1.5
    """

    figure: "Figure"
    rows: list[dict[str, Any]]

    def save(self, path: str | Path) -> Path:
        """Write an image (.svg, .png, .pdf) or the data (.csv, .json), atomically."""
        path = check_path(path)
        suffix = path.suffix.lower()
        if suffix == ".csv":
            return write_atomic(path, self.as_csv().encode())
        if suffix == ".json":
            return write_atomic(path, json.dumps(self.as_records(), indent=1).encode())
        return write_atomic(path, self.as_image(suffix))

    def as_image(self, suffix: str) -> bytes:
        """Render the figure in the format of a suffix, for example `.svg`."""
        from matplotlib import rc_context

        buffer = BytesIO()
        with rc_context({"svg.hashsalt": "headwise"}):
            metadata = {DATE_METADATA[suffix]: None} if suffix in DATE_METADATA else None
            self.figure.savefig(buffer, format=suffix.removeprefix("."), dpi=DPI, metadata=metadata)
        return buffer.getvalue()

    def as_csv(self) -> str:
        """Return the data as CSV."""
        buffer = StringIO()
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        writer = csv.DictWriter(buffer, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.as_records())
        return buffer.getvalue()

    def as_records(self) -> list[dict[str, Any]]:
        """Return the data for JSON. NaN and infinity become None."""
        return [
            {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in row.items()}
            for row in self.rows
        ]

    def _repr_png_(self) -> bytes:
        return self.as_image(".png")


def check_path(path: str | Path, suffixes: Sequence[str] = (*IMAGE_SUFFIXES, *DATA_SUFFIXES)) -> Path:
    """Check that a figure can be written to a path, before long computations."""
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise ArgumentError(f"path: the suffix must be one of {', '.join(suffixes)}. Got {str(path)!r}.")
    if not path.parent.is_dir():
        raise ArgumentError(f"path: the folder {path.parent} does not exist. Create it before writing {path.name}.")
    return path


def make_figure(width: float, height: float) -> "Figure":
    """Create an empty figure. The sizes are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=BACKGROUND, layout="constrained")


def style_axes(axes: "Axes", x: str = "", y: str = "") -> None:
    """Set the axis labels and remove the frame."""
    axes.set_xlabel(x, fontsize=9, color=TEXT_COLOR)
    axes.set_ylabel(y, fontsize=9, color=TEXT_COLOR)
    axes.tick_params(labelsize=8, colors=TEXT_COLOR)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def escape_dollar(label: str) -> str:
    """Escape dollar signs, which start a formula in matplotlib."""
    return label.replace("$", r"\$")
