"""Progress on standard error: bars in a terminal, occasional lines in a file or a pipe."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from headwise.progress import Progress
from headwise.training.train_progress_display import BackoffTimer


class BarsDisplay:
    """Progress callback with one bar per task. Outside a terminal it prints a line from time to time."""

    def __init__(self, bars: Bars) -> None:
        self._bars, self._tasks, self._timer = bars, dict[str, TaskID](), BackoffTimer()

    def __call__(self, task: str, done: int, total: int | None) -> None:
        """Show the state of a task."""
        bars = self._bars
        if task not in self._tasks:
            self._tasks[task] = bars.add_task(task, total=total)
        bars.update(self._tasks[task], completed=done, total=total)
        if bars.disable and self._timer.is_due():
            amount = f"{done:,}" if total is None else f"{done:,} of {total:,}"
            print(f"{task}: {amount}", file=sys.stderr, flush=True)

    def print_note(self, text: str) -> None:
        """Print a line that stays."""
        if self._bars.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bars.console.print(text, highlight=False, markup=False)


@contextmanager
def show_progress(*, transient: bool = False) -> Iterator[Progress]:
    """Yield a progress callback `(task, done, total)`. Each task has its own bar, removed at the end if `transient`."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("remaining"),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Bars(*columns, console=console, disable=not console.is_terminal, transient=transient) as bars:
        yield BarsDisplay(bars)


@contextmanager
def resume_hint_on_interrupt() -> Iterator[None]:
    """After Ctrl-C in resumable work, print how to resume and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        print("headwise: stopped. Finished parts are saved. Run the same command again to resume.", file=sys.stderr)
        sys.exit(130)
