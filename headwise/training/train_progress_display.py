"""What a person sees of a run under way: on a terminal a live line, elsewhere a line per evaluation. On standard error."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from headwise.progress import Progress

SPARKLINE_CHARS = "▁▂▃▄▅▆▇█"


class BackoffTimer:
    """Now and then: after a few seconds, then ever more seldom, so that a log shows that work goes on and stays short."""

    def __init__(self, first_interval: float = 5.0, max_interval: float = 60.0) -> None:
        self.start = time.monotonic()
        self.next_time, self.interval, self.max_interval = first_interval, first_interval, max_interval

    def is_due(self) -> bool:
        """Whether it is time to say something again."""
        elapsed = time.monotonic() - self.start
        if elapsed < self.next_time:
            return False
        self.interval = min(self.max_interval, 2 * self.interval)
        self.next_time = elapsed + self.interval
        return True


class ProgressDisplay:
    """Shows the loss, the speed, the time left and a small curve; where nobody watches, a line now and then. A function
    is called instead, where one is given."""

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
        """A logged step."""
        self.losses.append(loss)
        if self.callback is not None:
            self.callback("training", done, self.steps)
        if self.progress_bar is not None:
            status = f"loss {loss:.3f}{self.valid_text} {sparkline(self.losses, 16)} {tokens_per_second:,.0f} tokens/s"
            self.progress_bar.update(self.task, completed=done, status=status)
        elif self.enabled and self.timer.is_due():
            self.log(f"step {done} of {self.steps}: loss {loss:.4f}, {tokens_per_second:,.0f} tokens/s")

    def log_evaluation(self, done: int, loss: float, valid_loss: float | None, seconds: float) -> None:
        """An evaluation."""
        if valid_loss is None:
            return
        self.valid_text = f", held out {valid_loss:.3f}"
        if self.enabled and self.progress_bar is None:
            print(
                f"step {done}: loss {loss:.4f}, held out {valid_loss:.4f}, {seconds:.0f} s", file=sys.stderr, flush=True
            )

    def log(self, text: str) -> None:
        """Something a person should know, shown or not."""
        if self.progress_bar is not None:
            self.progress_bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.progress_bar is not None:
            self.progress_bar.stop()


def sparkline(values: list[float], width: int) -> str:
    """A curve of so many characters.

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
    """Time spent and tokens a second, since the last look."""

    def __init__(self) -> None:
        self.start = self.last_time = time.perf_counter()
        self.tokens = 0

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.start

    def pop_tokens_per_second(self) -> float:
        """Tokens a second since this was asked last."""
        now = time.perf_counter()
        rate, self.last_time, self.tokens = self.tokens / max(1e-9, now - self.last_time), now, 0
        return rate
