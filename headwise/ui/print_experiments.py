"""Terminal tables of sweeps and claims, and the report folder of claims."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from headwise.experiments.claim import VERDICTS, Claim
from headwise.experiments.engine.statistic import Condition, Statistic
from headwise.experiments.head_count_sweep import HeadSweep
from headwise.experiments.run_claims import ClaimResult
from headwise.experiments.seed_runs import ClaimSeedStatus
from headwise.experiments.trained_model_provider import EXPLORED_SEEDS
from headwise.io.atomic_write import atomic_folder, write_atomic
from headwise.ui.claims_page_data import claims_report_data
from headwise.ui.figures.claim_charts import draw_claim, has_plottable_statistics
from headwise.ui.report import write_report
from headwise.ui.terminal_table import make_table

VERDICT_COLORS = {
    "holds": "green", "does not hold": "red", "depends": "yellow", "true by construction": "blue", "undecided": "magenta",
}  # fmt: skip


def show_sweep(sweep: HeadSweep, console: Console | None = None) -> None:
    """Print sizes, loss, speed and memory of each model, then its probe accuracies and the diversity of its heads."""
    probes, first = list(sweep.rows[0].probe_accuracy), sweep.rows[0]
    has_names = not all(row.name == str(row.heads) for row in sweep.rows)  # otherwise the name is the head count
    sizes = ("heads", "head_dim", "layers", "parameters")
    sizes = [size for size in sizes if size == "heads" or len({getattr(row, size) for row in sweep.rows}) > 1]
    rows = [
        (
            *([row.name] * has_names), *(getattr(row, size) for size in sizes), row.loss.mean, _format_interval(row.loss),
            _format_integer(row.speed), _format_integer(row.memory),
        )
        for row in sweep.rows
    ]  # fmt: skip
    columns = [*([""] * has_names), *sizes, "loss", "95% CI", "tokens/s", "MB"]
    console = console or Console()
    title = f"Held-out loss (nats per token); {sweep.seeds} seeds, {sweep.steps} steps, width {sweep.width}, "
    parameter_counts = {f"{row.parameters:,} parameters" for row in sweep.rows}
    title += f"constant {sweep.constant}" + (f", {parameter_counts.pop()}" if len(parameter_counts) == 1 else "")
    console.print(make_table(title, columns, rows))
    if probes or first.diversity:
        probe_rows = [
            (
                row.name, *(row.probe_accuracy[probe].mean for probe in probes),
                f"{row.diversity['js'].mean:.3f}" if row.diversity else "–",
            )
            for row in sweep.rows
        ]  # fmt: skip
        kind = "" if has_names else "heads"
        console.print(
            make_table(
                "Probe accuracy, and mean JS divergence between heads", [kind, *probes, "JS divergence"], probe_rows
            )
        )
    best = sweep.best
    console.print(
        f"Best: {best.heads} heads with head_dim {best.head_dim} in {best.layers} layers. Largest loss difference from "
        f"{first.name} to {sweep.rows[-1].name}: {max(r.loss.mean for r in sweep.rows) - best.loss.mean:.3f} nats",
        highlight=False,
    )


def show_claim_list(claims: Sequence[Claim], console: Console | None = None) -> None:
    """Print the claims, one per line."""
    rows = [(claim.number, claim.name, claim.statement) for claim in claims]
    (console or Console()).print(make_table("Claims", ["", "name", "statement"], rows))


def show_seed_status(rows: Sequence[ClaimSeedStatus], folder: str, console: Console | None = None) -> None:
    """Print the planned and finished seeds of each claim."""
    table = [
        (row.name, "" if row.planned is None else row.planned, len(row.finished), _describe_ranges(row.finished))
        for row in rows
    ]
    (console or Console()).print(
        make_table(f"Seeds with figures in {folder}", ["claim", "planned seeds", "finished", "seeds"], table)
    )


def _describe_ranges(seeds: Sequence[int]) -> str:
    """Return seeds as ranges, such as 500–502, 504."""
    ranges: list[list[int]] = []
    for seed in sorted(seeds):
        if ranges and seed == ranges[-1][1] + 1:
            ranges[-1][1] = seed
        else:
            ranges.append([seed, seed])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in ranges)


def show_claims(results: Sequence[ClaimResult], console: Console | None = None) -> None:
    """Print the verdicts, and for up to three claims their statistics."""
    console = console or Console()
    rows = [(r.claim.number, r.claim.name, _colored_verdict(r), _verdict_note(r), r.claim.statement) for r in results]
    seeds_note = f", {_describe_seeds(results[0])}" if results else ""
    console.print(make_table(f"Verdicts{seeds_note}", ["", "claim", "verdict", "details", "statement"], rows))
    if len(results) <= 3:
        for result in results:
            statistic_rows = [
                (name, "" if at is None else str(at), f.mean, _format_interval(f)) for name, at, f in result.statistics
            ]
            console.print(
                make_table(
                    f"{result.claim.name}: {result.claim.full_rule}",
                    ["statistic", "at", "mean", result.interval_note],
                    statistic_rows,
                )
            )
    counts = {word: sum(r.verdict.word == word for r in results) for word in VERDICTS}
    console.print(", ".join(f"{count} {word}" for word, count in counts.items() if count), highlight=False)
    if any(result.is_exploratory for result in results):
        console.print(
            f"Seeds {EXPLORED_SEEDS[0]} to {EXPLORED_SEEDS[-1]} were used while the rules were written. "
            f"Use other seeds (--first-seed) for a confirmatory run.",
            highlight=False,
        )  # fmt: skip


def write_claims(results: Sequence[ClaimResult], folder: str | Path) -> Path:
    """Write a folder with the report page (claims.html), claims.md, claims.json and one figure per claim."""
    with atomic_folder(folder, ("claims.html",)) as new_folder:
        write_atomic(
            new_folder / "claims.json", json.dumps([result.to_dict() for result in results], indent=1).encode()
        )
        write_report(claims_report_data(results), new_folder / "claims.html")
        write_atomic(new_folder / "claims.md", claims_markdown(results).encode())
        for result in filter(has_plottable_statistics, results):
            draw_claim(result).save(new_folder / _image_name(result))
    return Path(folder)


def claims_markdown(results: Sequence[ClaimResult], image_folder: str = "") -> str:
    """Return all claims as Markdown, with verdicts, statistics and links to the figures in `image_folder`."""
    heading = f"Verdicts, {_describe_seeds(results[0])}." if results else ""
    lines = [heading, "", "| | claim | verdict |", "|---|---|---|"]
    lines += [f"| {r.claim.number} | [{r.claim.statement}](#{r.claim.name}) | {_format_verdict(r)} |" for r in results]
    for r in results:
        claim = r.claim
        lines += ["", f"## {claim.name}", "", f"*{claim.statement}* **{_format_verdict(r)}**", ""]
        lines += [f"Counterevidence: {claim.counterevidence} {claim.setup}", "", f"Rule: {claim.full_rule}", ""]
        lines += [f"True by construction, not a finding: {claim.identity}.", ""] if claim.identity else []
        lines += [f"![{claim.name}]({image_folder}{_image_name(r)})", ""] if has_plottable_statistics(r) else []
        lines += [f"| statistic | at: mean ({r.interval_note}) |", "|---|---|"]
        lines += [f"| {name} | {_format_statistics(r.statistics.by_condition(name))} |" for name in r.statistics.names]
        lines += ["", f"    {r.rerun_command}"]
    return "\n".join(lines) + "\n"


def _format_statistics(statistics: Mapping[Condition, Statistic]) -> str:
    return "; ".join(str(statistic) if at is None else f"{at}: {statistic}" for at, statistic in statistics.items())


def _verdict_note(result: ClaimResult) -> str:
    """Return the details of a verdict and the part of the claim that is true by construction."""
    identity = f"true by construction: {result.claim.identity}" if result.claim.identity else ""
    few_seeds = result.few_seeds_note if len(result.seeds) > 1 else ""  # the title says so for a single seed
    return "; ".join(part for part in (few_seeds, result.verdict.detail, identity) if part)


def _describe_seeds(result: ClaimResult) -> str:
    """Describe the seeds or the model."""
    if result.model_name:
        return f"on {result.model_name}"
    first, last = result.seeds[0], result.seeds[-1]
    return f"one seed ({first}): indicative" if first == last else f"{len(result.seeds)} seeds ({first} to {last})"


def _format_verdict(result: ClaimResult) -> str:
    return f"{result.verdict}{f' ({result.few_seeds_note})' if result.has_few_seeds else ''}"


def _image_name(result: ClaimResult) -> str:
    return f"{result.claim.number:02}-{result.claim.name}.svg"


def _colored_verdict(result: ClaimResult) -> Text:
    return Text(result.verdict.word, VERDICT_COLORS[result.verdict.word])


def _format_integer(statistic: Statistic) -> str:
    return f"{statistic.mean:,.0f}" if math.isfinite(statistic.mean) else "–"


def _format_interval(statistic: Statistic) -> str:
    return "" if statistic.low is None or statistic.high is None else f"{statistic.low:.4g} to {statistic.high:.4g}"
