"""Cutting in the terminal: what goes, what it brought and cost, loss against heads kept."""

from rich.console import Console

from headwise.compression.curve import Curve
from headwise.compression.plan import Plan
from headwise.compression.rankers import WAYS
from headwise.compression.report import Report
from headwise.ui.tables import make_table

STAY = 3  # heads told that stay, to see how near they were


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print which heads go, and what each of them is worth, the cheapest first."""
    console = console or Console()
    console.print(str(plan), highlight=False)
    score = WAYS[plan.by].score if plan.by in WAYS else ""
    if not score or not plan.scores:
        return
    goes = set(plan.cut)
    ranked = sorted(((str(head), score) for head, score in plan.worth.items()), key=lambda one: one[1])
    console.print(f"Cheapest first, a head and its score ({score}):", highlight=False)
    console.print("  ".join(_scored(one) for one in ranked if one[0] in goes), highlight=False)
    stay = [one for one in ranked if one[0] not in goes][:STAY]
    console.print(f"The cheapest that stay: {'  '.join(map(_scored, stay))}", highlight=False)


def show_report(report: Report, console: Console | None = None) -> None:
    """Print sizes and speed, then losses; all of them once more after healing."""
    console = console or Console()
    rows = [
        [name, _number(a), _number(b), f"{share:.3f}" if a else "", ""] for name, a, b, share in report.rows() if a or b
    ]
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


def _scored(one: tuple[str, float]) -> str:
    """A head and its score, never torn apart at the end of a line."""
    return f"{one[0]}\u00a0{one[1]:.4f}"
