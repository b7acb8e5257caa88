"""Ctrl-C, or a polite kill, while training."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C or a polite kill is noted, so that the step can end and be saved; a second one is obeyed at once."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
