"""Table of the checks of `selftest`."""

from rich.console import Console

from headwise.experiments.device_selftest import SelfTestReport
from headwise.ui.terminal_table import make_table


def print_selftest(report: SelfTestReport, console: Console | None = None) -> None:
    """Print one row per check, and the number of checks that passed, failed or were skipped."""
    console = console or Console()
    rows = [
        (
            check.name,
            check.status,
            "" if check.error is None else f"{check.error:.1e}",
            "" if check.bound is None else f"{check.bound:.1e}",
            f"{check.seconds:.1f}",
            check.note,
        )
        for check in report.checks
    ]
    title = f"Self-test on {report.device} in {report.dtype}, torch {report.torch_version}"
    console.print(make_table(title, ["check", "status", "error", "bound", "seconds", "note"], rows))
    counts = {word: sum(check.status == word for check in report.checks) for word in ("passed", "failed", "skipped")}
    console.print(", ".join(f"{count} {word}" for word, count in counts.items() if count), highlight=False)
