"""Cutting in the terminal: what goes, what it brought and cost, loss against heads kept."""

from rich.console import Console

from headwise.compression.plan_report import PlanReport
from headwise.compression.pruning_curve import PruningCurve
from headwise.compression.rankers import RANKERS
from headwise.spec import Plan
from headwise.ui.terminal_table import make_table

NUM_KEPT_SHOWN = 3  # heads told that stay, to see how near they were


def show_prune_plan(plan: Plan, console: Console | None = None) -> None:
    """Print which heads go, and what each of them is worth, the cheapest first."""
    console = console or Console()
    console.print(str(plan), highlight=False)
    score = RANKERS[plan.ranking].score_description if plan.ranking in RANKERS else ""
    if not score or not plan.scores:
        return
    pruned = set(plan.pruned_heads)
    ranked = sorted(((str(head), score) for head, score in plan.head_scores.items()), key=lambda pair: pair[1])
    console.print(f"Cheapest first, a head and its score ({score}):", highlight=False)
    console.print("  ".join(_format_scored_head(pair) for pair in ranked if pair[0] in pruned), highlight=False)
    kept_heads = [pair for pair in ranked if pair[0] not in pruned][:NUM_KEPT_SHOWN]
    console.print(f"The cheapest that stay: {'  '.join(map(_format_scored_head, kept_heads))}", highlight=False)


def show_prune_report(report: PlanReport, console: Console | None = None) -> None:
    """Print sizes and speed, then losses; all of them once more after healing."""
    console = console or Console()
    rows = [
        [name, _format_number(a), _format_number(b), f"{fraction:.3f}" if a else "", ""]
        for name, a, b, fraction in report.footprint_rows()
        if a or b
    ]
    rows[-1][-1] = str(report.time)
    console.print(make_table("What cutting brought", ["", "before", "after", "share", "quartiles"], rows))
    title = f"What it cost: loss, {report.metric}, {report.texts} texts, with 95 % intervals"
    console.print(make_table(title, ["", "mean", "low", "high"], report.loss_rows()))


def show_pruning_curve(curve: PruningCurve, console: Console | None = None) -> None:
    """Print every cut."""
    title = f"Loss, {curve.metric}, {curve.texts} texts; the full model's is {curve.full_loss.mean:.3f}. "
    title += f"Of {curve.seeds} random cuts: mean, least, most"
    columns = ["by", "kept", "heads", "loss", "more than full", "low", "high"]
    (console or Console()).print(make_table(title, columns, curve.rows()))


def _format_number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"  # seconds: so that their share can be checked
    return f"{value:,}" if isinstance(value, int) else str(value)


def _format_scored_head(pair: tuple[str, float]) -> str:
    """A head and its score, never torn apart at the end of a line."""
    return f"{pair[0]}\u00a0{pair[1]:.4f}"
