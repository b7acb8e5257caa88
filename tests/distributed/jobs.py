"""Jobs for executor tests: functions of an importable module."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headwise.errors import HeadwiseError


def square(value: int) -> int:
    return value * value


def threads(_: int) -> int:
    return torch.get_num_threads()


def process(_: int) -> int:
    return os.getpid()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, at most ten minutes."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def process_of_two(folder: str, _: int) -> int:
    """Return the process of the job. It waits until two processes have started a job."""
    (Path(folder) / str(os.getpid())).touch()
    wait_for(lambda: len(os.listdir(folder)) >= 2)
    return os.getpid()


def raise_on_two(value: int) -> int:
    if value == 2:
        raise HeadwiseError("two is not taken; give another number.")
    return value


def append_mark(folder: str, index: int) -> int:
    """Append a mark to a file at each start."""
    with open(Path(folder) / str(index), "a") as file:
        file.write("x")
    return index


def die_once(folder: str, index: int) -> int:
    """Kill the worker of the third job at its first start, while the fourth job runs."""
    append_mark(folder, index)
    mark = Path(folder) / "killed"
    if index == 2 and not mark.exists():
        wait_for((Path(folder) / "3").exists)
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 3:
        wait_for(mark.exists)
    return index


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
