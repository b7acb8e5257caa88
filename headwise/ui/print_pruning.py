"""Terminal tables of pruning: the plan, its savings and its cost in loss, and the pruning curve."""

from rich.console import Console

from headwise.compression.plan_report import PlanReport
from headwise.compression.pruning_curve import PruningCurves
from headwise.compression.rankers import RANKERS
from headwise.spec import Plan
from headwise.ui.terminal_table import make_table

NUM_KEPT_SHOWN = 3  # remaining heads with the lowest scores


def show_prune_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the pruned heads and their scores, lowest first."""
    console = console or Console()
    console.print(str(plan), highlight=False)
    score = RANKERS[plan.ranking].score_description if plan.ranking in RANKERS else ""
    if not score or not plan.scores:
        return
    pruned = set(plan.pruned_heads)
    ranked = sorted(((str(head), score) for head, score in plan.head_scores.items()), key=lambda pair: pair[1])
    console.print(f"Pruned heads with their scores ({score}), lowest first:", highlight=False)
    console.print("  ".join(_format_scored_head(pair) for pair in ranked if pair[0] in pruned), highlight=False)
    kept_heads = [pair for pair in ranked if pair[0] not in pruned][:NUM_KEPT_SHOWN]
    console.print(
        f"Remaining heads with the lowest scores: {'  '.join(map(_format_scored_head, kept_heads))}", highlight=False
    )


def show_prune_report(report: PlanReport, console: Console | None = None) -> None:
    """Print sizes and speed, then the losses, also after recovery fine-tuning."""
    console = console or Console()
    rows = [
        [name, _format_number(a), _format_number(b), f"{fraction:.3f}" if a else "", ""]
        for name, a, b, fraction in report.footprint_rows()
        if a or b
    ]
    rows[-1][-1] = str(report.time)
    console.print(
        make_table("Size and speed before and after pruning", ["", "before", "after", "ratio", "quartiles"], rows)
    )
    title = f"Loss ({report.metric}) on {report.texts} texts, with 95% CI"
    console.print(make_table(title, ["", "mean", "low", "high"], report.loss_rows()))


def show_pruning_curve(curve: PruningCurves, console: Console | None = None) -> None:
    """Print every point of the curve."""
    title = f"Loss ({curve.metric}) on {curve.texts} texts, with 95% CI; full model: {curve.full_loss.mean:.3f}. "
    title += f"random: mean, minimum and maximum of {curve.seeds} seeds"
    columns = ["ranking", "fraction", "heads", "loss", "increase", "low", "high"]
    (console or Console()).print(make_table(title, columns, curve.rows()))


def _format_number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"  # seconds, with enough digits to check the ratio
    return f"{value:,}" if isinstance(value, int) else str(value)


def _format_scored_head(pair: tuple[str, float]) -> str:
    """Return a head and its score, joined by a no-break space."""
    return f"{pair[0]}\u00a0{pair[1]:.4f}"
