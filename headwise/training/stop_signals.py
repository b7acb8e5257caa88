"""Handling of SIGINT (Ctrl-C) and SIGTERM during training."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """Record the first SIGINT or SIGTERM, so that the current step is finished and saved. A second one interrupts at once."""
    signals: list[int] = []

    def on_signal(signum: int, frame: object) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(signum)

    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    previous_handlers = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)
