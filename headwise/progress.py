"""Progress of long-running functions: a callback, or by default one line on stderr in a terminal or a notebook.

A function with `@shows_progress` accepts `progress=None` (a line, if a person is watching), `False` (no line) or a callback.
Functions that it calls do not open lines of their own.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

# Arguments: name of the current step, items done, total items (None if the total is not known yet).
Progress = Callable[[str, int, int | None], object]
# None shows a line in a terminal or a notebook, False shows nothing, a callback is called instead. True is the same as None.
ProgressOption = Progress | bool | None
P = ParamSpec("P")
R = TypeVar("R")

FIRST_SECONDS, INTERVAL_SECONDS = 1.0, 0.2  # time before the line appears, and between two updates
_is_reported: ContextVar[bool] = ContextVar("progress is reported by a caller", default=False)


def shows_progress(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function with a keyword `progress`, so that it shows a line by default."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _open_progress_callback(kwargs.get("progress")) as callback:  # pyright: ignore[reportArgumentType]
            return function(*args, **(kwargs | {"progress": callback}))  # pyright: ignore[reportCallIssue]

    return run


def callback_of(progress: ProgressOption) -> Progress | None:
    """Return the callback of an option that `shows_progress` has resolved."""
    return None if isinstance(progress, bool) else progress


def is_interactive_output() -> bool:
    """Return whether stderr is a terminal or the output of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell" or bool(getattr(sys.stderr, "isatty", bool)())


@contextmanager
def _open_progress_callback(progress: object) -> Iterator[Progress | None]:
    """Yield the callback of a call. Calls inside the context get no line of their own."""
    line = None
    if progress in (None, True):
        line = ProgressLine() if not _is_reported.get() and is_interactive_output() else None
        callback: Progress | None = line
    else:
        callback = None if progress is False else progress  # pyright: ignore[reportAssignmentType]
    token = _is_reported.set(True)
    try:
        yield callback
    finally:
        _is_reported.reset(token)
        if line is not None:
            line.clear()


@runtime_checkable
class ProgressWithNotes(Protocol):
    """A progress callback that can also print lines that stay."""

    def __call__(self, step: str, done: int, total: int | None) -> object:
        """Show a step."""
        ...

    def print_note(self, text: str) -> object:
        """Print a line that stays."""
        ...


class ProgressLine:
    """One line on stderr that is overwritten: `head importance: 12 of 270 (4%), 0:21`. Cleared at the end."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next = self._start + FIRST_SECONDS
        self._length = 0

    def __call__(self, step: str, done: int, total: int | None) -> None:
        """Show a step."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL_SECONDS
        minutes, seconds = divmod(int(now - self._start), 60)
        amount = f"{done:,}" if not total else f"{done:,} of {total:,} ({done * 100 // total}%)"
        self._write(f"{step}: {amount}, {minutes}:{seconds:02d}")

    def print_note(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line."""
        if self._length:
            self._write("")
            sys.stderr.write("\r")
            sys.stderr.flush()
            self._length = 0

    def _write(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._length))
        sys.stderr.flush()
        self._length = len(text)
