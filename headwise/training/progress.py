"""What a person sees of a run under way: on a terminal a live line, elsewhere a line per evaluation. On standard error."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from headwise.progress import Progress

BARS = "▁▂▃▄▅▆▇█"


class Now:
    """Now and then: after a few seconds, then ever more seldom, so that a log shows that work goes on and stays short."""

    def __init__(self, first: float = 5.0, most: float = 60.0) -> None:
        self.start = time.monotonic()
        self.next, self.wait, self.most = first, first, most

    def due(self) -> bool:
        """Whether it is time to say something again."""
        passed = time.monotonic() - self.start
        if passed < self.next:
            return False
        self.wait = min(self.most, 2 * self.wait)
        self.next = passed + self.wait
        return True


class Watch:
    """Shows the loss, the speed, the time left and a small curve; where nobody watches, a line now and then. A function
    is called instead, where one is given."""

    def __init__(self, steps: int, start: int, progress: Progress | bool) -> None:
        self.console = Console(stderr=True)
        self.tell = progress if callable(progress) else None
        self.shown = shown = progress is True
        self.live = None
        self.losses: list[float] = []
        self.valid = ""
        self.steps, self.now = steps, Now()
        if shown and self.console.is_terminal:
            columns = (
                TextColumn("{task.fields[told]}"), BarColumn(bar_width=20), MofNCompleteColumn(),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            )  # fmt: skip
            self.live = Bars(*columns, console=self.console, transient=False)
            self.task = self.live.add_task("", total=steps, completed=start, told="")
            self.live.start()

    def step(self, done: int, loss: float, speed: float) -> None:
        """A logged step."""
        self.losses.append(loss)
        if self.tell is not None:
            self.tell("training", done, self.steps)
        if self.live is not None:
            told = f"loss {loss:.3f}{self.valid} {curve(self.losses, 16)} {speed:,.0f} tokens/s"
            self.live.update(self.task, completed=done, told=told)
        elif self.shown and self.now.due():
            self.say(f"step {done} of {self.steps}: loss {loss:.4f}, {speed:,.0f} tokens/s")

    def evaluation(self, done: int, loss: float, held_out: float | None, seconds: float) -> None:
        """An evaluation."""
        if held_out is None:
            return
        self.valid = f", held out {held_out:.3f}"
        if self.shown and self.live is None:
            print(
                f"step {done}: loss {loss:.4f}, held out {held_out:.4f}, {seconds:.0f} s", file=sys.stderr, flush=True
            )

    def say(self, text: str) -> None:
        """Something a person should know, shown or not."""
        if self.live is not None:
            self.live.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.live is not None:
            self.live.stop()


def curve(values: list[float], width: int) -> str:
    """A curve of so many characters.

    >>> curve([3.0, 2.0, 1.0], 3)
    '█▅▁'
    """
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    some = [values[int(i * step)] for i in range(min(width, len(values)))]
    low, high = min(some), max(some)
    return "".join(BARS[round((v - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for v in some)


class Clock:
    """Time spent and tokens a second, since the last look."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.tokens = 0

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self.start

    def speed(self) -> float:
        """Tokens a second since this was asked last."""
        now = time.perf_counter()
        speed, self.last, self.tokens = self.tokens / max(1e-9, now - self.last), now, 0
        return speed
