"""Terminal output of the demo. Each stage fits on a screen of 25 lines and 80 columns."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from headwise.ui.print_head_search import control_sentence, shared_weights_sentence
from headwise.ui.role_badges import role_badge
from headwise.ui.terminal_head_grid import make_selected_heads_grid
from headwise.ui.terminal_table import make_table

if TYPE_CHECKING:
    from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult
    from headwise.analysis.finding.head_search_result import HeadSearchResult
    from headwise.analysis.recording.attention_maps import AttentionEdge
    from headwise.analysis.roles.head_profile import HeadProfile
    from headwise.analysis.roles.profile_result import Profile
    from headwise.compression.paired_evaluation import LossEstimate
    from headwise.compression.plan_report import PlanReport
    from headwise.spec import Plan
    from headwise.ui.train_and_prune_demo import DemoTrainResult

MAX_STAGE_LINES = 25  # of one stage, at 80 columns
MAX_ROLES, MAX_EMERGENCE_ROWS = 6, 6  # table rows
MAX_SUMMARY_LINES = 16  # lines of the summary of one head
GRID_LEGEND = (
    "Letters: role, see the table. Without a role: ‥‥ attention sink, ~~ diffuse\n"
    "attention, __ output near zero, ·· other."
)


class StagePrinter:
    """Prints a numbered heading, the elapsed seconds and one sentence at the start of each stage.

    Attributes:
        console: Output of the demo.
        num_stages: Number of stages of this run.
        stage: Number of the current stage, from 1.
    """

    def __init__(self, console: Console, num_stages: int) -> None:
        self.console, self.num_stages, self.stage, self.start = console, num_stages, 0, time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.start

    def print_stage(self, title: str, sentence: str) -> None:
        """Print the heading of the next stage and one sentence about it."""
        self.stage += 1
        heading = f"\n{self.stage} of {self.num_stages}: {title} ({self.elapsed():.0f} s)"
        self.console.print(heading, style="bold", highlight=False, markup=False)
        self.console.print(sentence, highlight=False, markup=False)


def show_demo_attention_edges(edges: "Sequence[AttentionEdge]", console: Console) -> None:
    """Print the heads with the largest attention weights of one word."""
    rows = [(edge.head, edge.word, edge.attended, edge.weight) for edge in edges]
    console.print(make_table("", ["head", "word", "attends to", "weight"], rows))


def show_demo_search(result: "HeadSearchResult", console: Console) -> None:
    """Print the best heads of a search, the control and the shared layers."""
    rows = [
        (
            item.address,
            item.evidence_level,
            item.score,
            f"{item.interval[0]:.2f}–{item.interval[1]:.2f}",
            item.baseline,
            item.p,
        )
        for item in list(result)[:4]
    ]
    columns = ["head", "evidence", "score", "95% CI", "baseline", "p"]
    console.print(make_table("", columns, rows))
    console.print(control_sentence(result), highlight=False)
    if result.supported_heads:
        console.print(shared_weights_sentence(result), highlight=False)


def show_demo_roles(profile: "Profile", profile_path: Path, console: Console) -> None:
    """Print the grid of all heads and the best heads of the roles with the strongest evidence."""
    grid = make_selected_heads_grid(profile, {str(address) for address in profile.addresses}, console.width)
    grid.rstrip()
    console.print(grid)
    console.print(Text(GRID_LEGEND, "dim"))
    best = [
        (address, next(evidence for evidence in profile[address].roles if evidence.role == role))
        for role, (address, *_) in profile.heads_by_role().items()
    ]
    best.sort(key=lambda pair: pair[1].sort_key, reverse=True)
    rows = [
        (
            evidence.role, Text(*role_badge(evidence.role)), str(address), evidence.evidence_level, evidence.score,
            evidence.baseline, f"{evidence.interval[0]:.2f}–{evidence.interval[1]:.2f}",
        )
        for address, evidence in best[:MAX_ROLES]
    ]  # fmt: skip
    if not rows:
        console.print("No head has a role yet; the training was too short.", highlight=False)
        return
    console.print(make_table("", ["role", "", "best head", "evidence", "score", "baseline", "95% CI"], rows))
    more = f"{len(best) - MAX_ROLES} more roles, and examples" if len(best) > MAX_ROLES else "Examples of each role"
    console.print(f"{more}: headwise profile {profile_path}", highlight=False, soft_wrap=True)


def show_demo_head(profile: "Profile", head: "HeadProfile", report_path: Path, console: Console) -> None:
    """Print the first lines of the summary of one head, and the path of the report."""
    from headwise.ui.head_summary import summary_lines

    remaining = MAX_SUMMARY_LINES
    for line in summary_lines(profile, head):
        wrapped = Text(line.text).wrap(console, console.width)
        if len(wrapped) > remaining:
            break
        console.print(wrapped)
        remaining -= len(wrapped)
    console.print(f"\nReport with all heads, for the browser: {report_path}", highlight=False, soft_wrap=True)


def show_demo_pruning(plan: "Plan", report: "PlanReport", console: Console) -> None:
    """Print sizes and losses before and after pruning, next to random pruning of the same size."""
    before, after, timing = report.before, report.after, report.time
    sizes = [
        ["heads", before.heads, after.heads],
        ["parameters", before.parameters, after.parameters],
        ["KV cache, bytes per token", before.cache_bytes_per_token, after.cache_bytes_per_token],
        [f"milliseconds per {report.length} tokens", 1000 * timing.before, 1000 * timing.after],
    ]
    rows = [[label, old, new, new / old] for label, old, new in sizes]
    title = f"{len(plan.pruned_heads)} of {len(plan.spec.head_addresses)} heads pruned, ranked by {plan.ranking}"
    console.print(make_table(title, ["", "full model", "pruned", "ratio"], rows))
    title = f"Loss (nats per token) on {report.texts} held-out texts, 95% CI (random: min, max)"
    console.print(make_table(title, ["", "loss", "low", "high"], _loss_rows(report)))


def _loss_rows(report: "PlanReport") -> list[list[str | float]]:
    rows = [_loss_row("full model", report.loss_before), _loss_row("pruned", report.loss_after)]
    if report.random:
        rows.append(
            _random_row(f"pruned at random ({len(report.random)} seed{'s' * (len(report.random) > 1)})", report.random)
        )
    if report.recovered is not None:
        rows.append(_loss_row("pruned, then fine-tuned", report.recovered.loss))
        if report.recovered.random:
            rows.append(_random_row("pruned at random, then fine-tuned", report.recovered.random))
        rows.append(_loss_row("full model, fine-tuned", report.recovered.full_loss))
    return rows


def _loss_row(label: str, estimate: "LossEstimate") -> list[str | float]:
    return [label, estimate.mean, estimate.low, estimate.high]


def _random_row(label: str, losses: Sequence[float]) -> list[str | float]:
    return [label, sum(losses) / len(losses), min(losses), max(losses)]


def show_demo_costs(
    sensitivity: "SensitivityResult", cache_rows: Sequence[tuple[str, str, str, float]], console: Console
) -> None:
    """Print the cost of quantizing each part of two heads, and the size of their KV caches."""
    rows = [
        [
            cost.heads, cost.part, f"{cost.loss_increase:+.4f}", f"{cost.low:+.4f} to {cost.high:+.4f}",
            f"{cost.kl_divergence:.4f}",
        ]
        for cost in sensitivity
    ]  # fmt: skip
    title = f"Loss increase on {len(sensitivity.counts)} texts if one part is quantized"
    console.print(make_table(title, ["heads", "part", "loss increase", "95% CI", "KL divergence"], rows))
    columns = ["head", "KV head", "shared with", "MB"]
    console.print(make_table("KV cache of 4,096 tokens", columns, [[*row[:3], f"{row[3]:.1f}"] for row in cache_rows]))


def show_demo_training(result: "DemoTrainResult", console: Console) -> None:
    """Print the accuracy of the trained model, and the training step at which heads learned each task."""
    trained = result.trained
    title = f"Accuracy on held-out texts after {trained.step:,} steps ({trained.seconds:.0f} s)"
    console.print(make_table(title, ["probe", "cases", "accuracy", "chance", "bigram"], result.probe_scores))
    best = sorted(result.emergence(), key=lambda row: row[3], reverse=True)[:MAX_EMERGENCE_ROWS]
    if best:
        title = "First head with an accuracy of 0.5 in a relation, and its final accuracy"
        console.print(make_table(title, ["step", "head", "relation", "final accuracy"], sorted(best)))
    else:
        console.print("No head has learned a relation yet; the training was too short.", highlight=False)


def show_next_steps(folder: Path, *, pretrained: bool, trained: bool, console: Console) -> None:
    """Print commands to try after the demo."""
    steps: list[tuple[str, str]] = []
    if pretrained:
        steps += [
            ("Inspect a text and silence heads in the browser", "headwise view minilm"),
            ("Summarize one head, with its evidence and cost", "headwise describe minilm 3.1"),
            (
                "Explain one attention weight",
                'headwise explain smollm2 "The teacher gave the students their homework." --head 13.8 --query their',
            ),
            (
                "Apply the pruning plan",
                f"headwise prune smollm2 --plan {folder / 'pruned' / 'plan.json'} --out smaller",
            ),
        ]
    if trained:
        run = folder / "trained"
        steps.append(
            ("Inspect the trained model", f"headwise view {run / 'model'} --profile {run / 'profile.npz'}"),
        )
    else:
        steps.append(("Train a small model and see its heads learn", f"headwise demo --train --out {folder}"))
    steps += [
        ("Profile a model of yours on a text of yours", "headwise profile MODEL book.txt --report heads.html"),
        ("List all commands", "headwise --help"),
    ]
    console.print("\nWhat to try next", style="bold")
    for description, command in steps:
        console.print(f"  {description}:\n    {command}", highlight=False, markup=False, soft_wrap=True)
