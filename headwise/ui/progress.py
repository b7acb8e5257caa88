"""Progress on standard error: bars in a terminal, occasional lines in a file or a pipe."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from headwise.progress import Progress
from headwise.training.train_progress_display import BackoffTimer


@contextmanager
def show_progress(*, transient: bool = False) -> Iterator[Progress]:
    """Yield a progress callback `(task, done, total)`. Each task has its own bar, removed at the end if `transient`."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("remaining"),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Bars(*columns, console=console, disable=not console.is_terminal, transient=transient) as bars:
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
    """After Ctrl-C in resumable work, print how to resume and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        print("headwise: stopped. Finished parts are saved. Run the same command again to resume.", file=sys.stderr)
        sys.exit(130)
