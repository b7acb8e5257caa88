"""Record Ctrl-C, because a library may convert KeyboardInterrupt to another exception."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def record_sigint_and_raise() -> Iterator[list[int]]:
    """Yield a list that is empty until Ctrl-C is pressed. KeyboardInterrupt is raised as usual."""
    received: list[int] = []

    def handler(signum: int, frame: object) -> None:
        received.append(signum)
        raise KeyboardInterrupt

    previous = signal.getsignal(signal.SIGINT)
    installed = threading.current_thread() is threading.main_thread() and previous is signal.default_int_handler
    if installed:
        signal.signal(signal.SIGINT, handler)
    try:
        yield received
    finally:
        if installed:
            signal.signal(signal.SIGINT, previous)
