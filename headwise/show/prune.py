"""Cutting in the terminal: what goes, what it brought and cost, loss against heads kept."""

from rich.console import Console

from headwise.change.curve import Curve
from headwise.change.plan import Plan
from headwise.change.report import Report
from headwise.show.tables import make_table


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print which heads go."""
    (console or Console()).print(str(plan), highlight=False)


def show_report(report: Report, console: Console | None = None) -> None:
    """Print sizes and speed, then losses; all of them once more after healing."""
    console = console or Console()
    rows = [[name, _number(a), _number(b), f"{share:.3f}" if a else "", ""] for name, a, b, share in report.rows()]
    rows[-1][-1] = str(report.time)
    console.print(make_table("What cutting brought", ["", "before", "after", "share", "quartiles"], rows))
    title = f"What it cost: loss, {report.metric}, {report.texts} texts, with 95 % intervals"
    console.print(make_table(title, ["", "mean", "low", "high"], report.losses()))


def show_curve(curve: Curve, console: Console | None = None) -> None:
    """Print every cut."""
    title = f"Loss, {curve.metric}, {curve.texts} texts; the full model's is {curve.full.mean:.3f}. "
    title += f"Of {curve.seeds} random cuts: mean, least, most"
    columns = ["by", "kept", "heads", "loss", "more than full", "low", "high"]
    (console or Console()).print(make_table(title, columns, curve.rows()))


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"  # seconds: so that their share can be checked
    return f"{value:,}" if isinstance(value, int) else str(value)
