"""Terminal tables for any width: cells wrap between words, and columns that do not fit go to another table below."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

COLUMN_GAP = 2  # characters between two columns
MAX_KEY_WIDTH = 24  # the first column names the row and does not wrap up to this width


@dataclass(frozen=True, eq=False)
class TextTable:
    """A title and columns, laid out when the terminal width is known."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the title, then one table, or several that each start with the first column."""
        if self.title:
            yield Text(self.title, "italic")
        for group in self.column_groups(options.max_width):
            yield self._rich_table(group)
            yield Text()

    def column_groups(self, width: int) -> list[dict[int, int]]:
        """Return the columns of each printed table, as a map from column number to width."""
        min_widths, full_widths = (
            [width_of(i, width) for i in range(len(self.columns))] for width_of in (self._min_width, self._full_width)
        )
        groups: list[list[int]] = [[0]]
        for column in range(1, len(self.columns)):
            if _total_width([min_widths[i] for i in (*groups[-1], column)]) > width and len(groups[-1]) > 1:
                groups.append([0])
            groups[-1].append(column)
        return [_distribute_width(group, min_widths, full_widths, width) for group in groups]

    def is_number(self, column: int) -> bool:
        """Whether a column has only numbers."""
        return bool(self.rows) and all(isinstance(row[column], int | float) for row in self.rows)

    def cells(self, column: int) -> Iterator[Text]:
        """Yield the heading and the cells of a column."""
        yield Text(self.columns[column], "bold")
        for row in self.rows:
            yield self._cell(row, column)

    def _min_width(self, column: int, width: int) -> int:
        """Return the minimum width that keeps numbers, row names and words up to half a line unbroken."""
        full_width = self._full_width(column, width)
        if self.is_number(column) or (column == 0 and full_width <= MAX_KEY_WIDTH):
            return full_width
        words = (word for cell in self.cells(column) for word in cell.plain.split())
        return min(max(map(cell_len, words), default=0), width // 2)

    def _full_width(self, column: int, width: int) -> int:
        """Return the width at which no cell wraps."""
        return max((cell_len(line) for cell in self.cells(column) for line in cell.plain.split("\n")), default=0)

    def _rich_table(self, group: dict[int, int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, COLUMN_GAP - 1, 0, 0))
        for column, width in group.items():
            right = self.is_number(column)
            table.add_column(
                self.columns[column], width=width, justify="right" if right else "left", overflow="fold",
                header_style="bold",
            )  # fmt: skip
        for row in self.rows:
            table.add_row(*(self._cell(row, column) for column in group))
        return table

    def _cell(self, row: Sequence[object], column: int) -> Text:
        """Return a cell as text. A p-value below 0.0005 is <0.001."""
        value = row[column]
        if self.columns[column] == "p" and isinstance(value, float) and value < 0.0005:
            return Text("<0.001")
        return as_text(value)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> TextTable:
    """Return a table with right-aligned numbers. Empty columns are left out.

    Floats have three decimals (– for NaN), integers have thousands separators. Use a rich Text for a colored cell.

    >>> make_table("Heads", ["head", "role"], [["5.1", "induction"]]).column_groups(80)  # one group of two columns
    [{0: 4, 1: 9}]
    """
    table_rows = [tuple(row) for row in rows]
    used_columns = [
        i for i in range(len(columns)) if i == 0 or not table_rows or any(str(row[i]) for row in table_rows)
    ]
    return TextTable(
        title, tuple(columns[i] for i in used_columns), tuple(tuple(row[i] for i in used_columns) for row in table_rows)
    )


def as_text(value: object) -> Text:
    """Return a cell as text."""
    if isinstance(value, Text):
        return value
    if isinstance(value, float):
        return Text("–" if math.isnan(value) else f"{value:.3f}")
    return Text(f"{value:,}" if isinstance(value, int) else str(value))


def _total_width(widths: Sequence[int]) -> int:
    """Return the width of a table with these columns."""
    return sum(widths) + COLUMN_GAP * (len(widths) - 1)


def _distribute_width(
    group: Sequence[int], min_widths: Sequence[int], full_widths: Sequence[int], width: int
) -> dict[int, int]:
    """Give the remaining width to the columns with the most text to wrap."""
    widths = {column: min_widths[column] for column in group}
    remaining = width - _total_width(list(widths.values()))
    while remaining > 0 and any(widths[column] < full_widths[column] for column in group):
        neediest = max(group, key=lambda column: full_widths[column] / max(1, widths[column]))
        widths[neediest] += 1
        remaining -= 1
    return widths
