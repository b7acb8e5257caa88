"""How far long work is, on standard error: bars in a terminal, a line now and then in a file or a pipe."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from headwise.progress import Progress
from headwise.training.train_progress_display import BackoffTimer


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Yields a function to call with what is done, how much of it, of how much; each kind of work gets its bar."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks, timer = {}, BackoffTimer()

        def progress(task: str, done: int, total: int | None) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total)
            bars.update(tasks[task], completed=done, total=total)
            if bars.disable and timer.is_due():
                amount = f"{done:,}" if total is None else f"{done:,} of {total:,}"
                print(f"{task}: {amount}", file=sys.stderr, flush=True)

        yield progress


@contextmanager
def resume_hint_on_interrupt() -> Iterator[None]:
    """Ctrl-C in work that can be gone on with: one line that says so, and the end that a shell expects."""
    try:
        yield
    except KeyboardInterrupt:
        print("headwise: stopped; what is finished is kept, and running the same again goes on.", file=sys.stderr)
        sys.exit(130)
