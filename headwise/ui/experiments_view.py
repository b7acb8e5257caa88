"""The lab in the terminal and on paper: sweeps, verdicts, and a folder with the page and the pictures of claims."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from headwise.experiments.claim import WORDS, Claim
from headwise.experiments.engine.statistic import At, Figure
from headwise.experiments.experiment import SEEN
from headwise.experiments.head_sweep import Sweep
from headwise.experiments.run import Result
from headwise.io.atomic_write import whole_file, whole_folder
from headwise.ui.claims_view import claims_book
from headwise.ui.figures.claims import draw_claim, is_drawn
from headwise.ui.report import write_report
from headwise.ui.tables import make_table

COLOURS = {
    "holds": "green", "does not hold": "red", "depends": "yellow", "true by construction": "blue",
}  # fmt: skip


def show_sweep(sweep: Sweep, console: Console | None = None) -> None:
    """Print a line for each model: what it is, how well it does, what it takes; and one for what its heads do."""
    quizzes, first = list(sweep.rows[0].marks), sweep.rows[0]
    named = not all(row.name == str(row.heads) for row in sweep.rows)  # else the name says nothing new
    sizes = ("heads", "head_dim", "layers", "parameters")
    sizes = [size for size in sizes if size == "heads" or len({getattr(row, size) for row in sweep.rows}) > 1]
    rows = [
        (
            *([row.name] * named), *(getattr(row, size) for size in sizes), row.loss.mean, _ends(row.loss),
            _whole(row.speed), _whole(row.memory),
        )
        for row in sweep.rows
    ]  # fmt: skip
    columns = [*([""] * named), *sizes, "loss", "95 %", "tokens/s", "MB"]
    console = console or Console()
    told = f"Held-out loss, nats a token; {sweep.seeds} seeds, {sweep.steps} steps, width {sweep.width}, "
    alike = {f"{row.parameters:,} parameters" for row in sweep.rows}
    told += f"constant {sweep.constant}" + (f", {alike.pop()}" if len(alike) == 1 else "")
    console.print(make_table(told, columns, rows))
    if quizzes or first.diversity:
        does = [
            (
                row.name, *(row.marks[quiz].mean for quiz in quizzes),
                f"{row.diversity['js'].mean:.3f}" if row.diversity else "–",
            )
            for row in sweep.rows
        ]  # fmt: skip
        kind = "" if named else "heads"
        console.print(make_table("Right answers; maps of heads apart", [kind, *quizzes, "maps apart"], does))
    best = sweep.best
    console.print(
        f"best: {best.heads} heads of {best.head_dim} in {best.layers} layers; {first.name} to {sweep.rows[-1].name} "
        f"differ by {max(r.loss.mean for r in sweep.rows) - best.loss.mean:.3f} nats at most",
        highlight=False,
    )


def list_claims(claims: Sequence[Claim], console: Console | None = None) -> None:
    """Print the claims, one a line."""
    rows = [(claim.number, claim.name, claim.says) for claim in claims]
    (console or Console()).print(make_table("Claims", ["", "name", "what is said"], rows))


def show_claims(results: Sequence[Result], console: Console | None = None) -> None:
    """Print verdicts, and for a few claims their figures."""
    console = console or Console()
    rows = [(r.claim.number, r.claim.name, _coloured(r), _beside(r), r.claim.says) for r in results]
    mark = f", {_seeds(results[0])}" if results else ""
    console.print(make_table(f"Verdicts{mark}", ["", "claim", "verdict", "on what, or how far", "what is said"], rows))
    if len(results) <= 3:
        for result in results:
            figures = [(name, "" if at is None else str(at), f.mean, _ends(f)) for name, at, f in result.figures]
            console.print(
                make_table(f"{result.claim.name}: {result.claim.rule}", ["figure", "at", "mean", result.ends], figures)
            )
    counts = {word: sum(r.verdict.word == word for r in results) for word in WORDS}
    console.print(", ".join(f"{count} {word}" for word, count in counts.items() if count), highlight=False)
    if any(result.seen for result in results):
        console.print(
            f"Seeds {SEEN[0]} to {SEEN[-1]} were looked at while rules were made: take others (--first-seed) for a run that "
            "is to count.",
            highlight=False,
        )  # fmt: skip


def write_claims(results: Sequence[Result], folder: str | Path) -> Path:
    """A folder with the page (claims.html), the same to read as text (claims.md), all figures, and each claim's picture."""
    with whole_folder(folder, ("claims.html",)) as new:
        whole_file(new / "claims.json", json.dumps([result.to_dict() for result in results], indent=1).encode())
        write_report(claims_book(results), new / "claims.html")
        whole_file(new / "claims.md", as_markdown(results).encode())
        for result in filter(is_drawn, results):
            draw_claim(result).save(new / _picture(result))
    return Path(folder)


def as_markdown(results: Sequence[Result], pictures: str = "") -> str:
    """Every claim with its verdict, its figures and its picture, which lies in the folder `pictures`."""
    told = f"Verdicts, {_seeds(results[0])}." if results else ""
    lines = [told, "", "| | claim | verdict |", "|---|---|---|"]
    lines += [f"| {r.claim.number} | [{r.claim.says}](#{r.claim.name}) | {_verdict(r)} |" for r in results]
    for r in results:
        claim = r.claim
        lines += ["", f"## {claim.name}", "", f"*{claim.says}* **{_verdict(r)}**", ""]
        lines += [f"Against it would count: {claim.against} {claim.setup}", "", f"The rule: {claim.rule}", ""]
        lines += [f"True by construction, and no finding: {claim.identity}.", ""] if claim.identity else []
        lines += [f"![{claim.name}]({pictures}{_picture(r)})", ""] if is_drawn(r) else []
        lines += [f"| figure | at: mean ({r.ends}) |", "|---|---|"]
        lines += [f"| {name} | {_figures_in_words(r.figures.at(name))} |" for name in r.figures.names]
        lines += ["", f"    {r.again}"]
    return "\n".join(lines) + "\n"


def _figures_in_words(some: Mapping[At, Figure]) -> str:
    return "; ".join(str(figure) if at is None else f"{at}: {figure}" for at, figure in some.items())


def _beside(result: Result) -> str:
    """What a verdict is on, and what of the claim is no finding."""
    identity = f"true by construction: {result.claim.identity}" if result.claim.identity else ""
    return "; ".join(part for part in (result.verdict.on, identity) if part)


def _seeds(result: Result) -> str:
    """Which seeds, in words; or which model."""
    if result.on:
        return f"on {result.on}"
    first, last = result.seeds[0], result.seeds[-1]
    return f"one seed ({first}): indicative" if first == last else f"{len(result.seeds)} seeds ({first} to {last})"


def _verdict(result: Result) -> str:
    return f"{result.verdict}{' (one seed: indicative)' if result.indicative else ''}"


def _picture(result: Result) -> str:
    return f"{result.claim.number:02}-{result.claim.name}.svg"


def _coloured(result: Result) -> Text:
    return Text(result.verdict.word, COLOURS[result.verdict.word])


def _whole(figure: Figure) -> str:
    return f"{figure.mean:,.0f}" if math.isfinite(figure.mean) else "–"


def _ends(figure: Figure) -> str:
    return "" if figure.low is None or figure.high is None else f"{figure.low:.4g} to {figure.high:.4g}"
