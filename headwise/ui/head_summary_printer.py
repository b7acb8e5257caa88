"""Print the summary of a head: sentences with the docs section that explains each, then the parts that were not measured."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from headwise.ui.glossary import docs_anchor


class HeadSummaryPrinter:
    """Prints sentences one after the other. A sentence that was already printed is left out.

    Args:
        console: Console.

    Attributes:
        lines: The printed lines.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lines: list[tuple[str, str]] = []
        self._last_anchor = ""

    def print_lines(self, lines: Iterable[Sequence[str]]) -> None:
        """Print lines, each a glossary entry and a sentence."""
        for term, text in lines:
            if (term, text) in self.lines:
                continue
            self.lines.append((term, text))
            self.console.print(Text(text))
            anchor = docs_anchor(term)
            if anchor != self._last_anchor:
                self.console.print(Text(f"  see {anchor}", "dim"))
            self._last_anchor = anchor

    def print_errors(self, errors: Iterable[str]) -> None:
        """Print the reasons why parts were not measured."""
        for error in dict.fromkeys(errors):
            self.console.print(Text(f"Not measured: {error}", "dim"))
