"""Progress of a run on standard error: a live line on a terminal, otherwise one line per evaluation."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from headwise.progress import Progress

SPARKLINE_CHARS = "▁▂▃▄▅▆▇█"


class BackoffTimer:
    """Timer with growing intervals, so that a log shows progress and stays short."""

    def __init__(self, first_interval: float = 5.0, max_interval: float = 60.0) -> None:
        self.start = time.monotonic()
        self.next_time, self.interval, self.max_interval = first_interval, first_interval, max_interval

    def is_due(self) -> bool:
        """Return whether the next message is due."""
        elapsed = time.monotonic() - self.start
        if elapsed < self.next_time:
            return False
        self.interval = min(self.max_interval, 2 * self.interval)
        self.next_time = elapsed + self.interval
        return True


class ProgressDisplay:
    """Shows loss, speed, remaining time and a loss curve. Outside a terminal it prints a line from time to time. If
    `progress` is a function, it is called instead."""

    def __init__(self, steps: int, start: int, progress: Progress | bool) -> None:
        self.console = Console(stderr=True)
        self.callback = progress if callable(progress) else None
        self.enabled = enabled = progress is True
        self.progress_bar = None
        self.losses: list[float] = []
        self.valid_text = ""
        self.steps, self.timer = steps, BackoffTimer()
        if enabled and self.console.is_terminal:
            columns = (
                TextColumn("{task.fields[status]}"), BarColumn(bar_width=20), MofNCompleteColumn(),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            )  # fmt: skip
            self.progress_bar = Bars(*columns, console=self.console, transient=False)
            self.task = self.progress_bar.add_task("", total=steps, completed=start, status="")
            self.progress_bar.start()

    def log_step(self, done: int, loss: float, tokens_per_second: float) -> None:
        """Show a logged step."""
        self.losses.append(loss)
        if self.callback is not None:
            self.callback("training", done, self.steps)
        if self.progress_bar is not None:
            status = f"loss {loss:.3f}{self.valid_text} {sparkline(self.losses, 16)} {tokens_per_second:,.0f} tokens/s"
            self.progress_bar.update(self.task, completed=done, status=status)
        elif self.enabled and self.timer.is_due():
            self.log(f"step {done} of {self.steps}: loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s")

    def log_evaluation(self, done: int, loss: float, valid_loss: float | None, seconds: float) -> None:
        """Show an evaluation."""
        if valid_loss is None:
            return
        self.valid_text = f", held out {valid_loss:.3f}"
        if self.enabled and self.progress_bar is None:
            print(
                f"step {done}: loss {loss:.4f}, held out {valid_loss:.4f}, {seconds:.0f} s", file=sys.stderr, flush=True
            )

    def log(self, text: str) -> None:
        """Print a message, even if progress is not shown."""
        if self.progress_bar is not None:
            self.progress_bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self.progress_bar is not None:
            self.progress_bar.stop()


def sparkline(values: list[float], width: int) -> str:
    """Return a loss curve of `width` characters.

    >>> sparkline([3.0, 2.0, 1.0], 3)
    '█▅▁'
    """
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    samples = [values[int(i * step)] for i in range(min(width, len(values)))]
    low, high = min(samples), max(samples)
    return "".join(
        SPARKLINE_CHARS[round((v - low) / ((high - low) or 1.0) * (len(SPARKLINE_CHARS) - 1))] for v in samples
    )


class ThroughputTimer:
    """Measures elapsed time and tokens per second."""

    def __init__(self) -> None:
        self.start = self.last_time = time.perf_counter()
        self.tokens = 0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def pop_tokens_per_second(self) -> float:
        """Return the tokens per second since the last call."""
        now = time.perf_counter()
        rate, self.last_time, self.tokens = self.tokens / max(1e-9, now - self.last_time), now, 0
        return rate
