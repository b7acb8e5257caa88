"""Ctrl-C, whatever becomes of it on its way: a library may turn it into an error of its own."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def noticed() -> Iterator[list[int]]:
    """Yields a list that is empty until Ctrl-C is pressed; KeyboardInterrupt is raised as ever."""
    pressed: list[int] = []

    def press(number: int, frame: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and usual is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        if ours:
            signal.signal(signal.SIGINT, usual)
