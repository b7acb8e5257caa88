"""What workers are asked to do in tests: functions of a module, as any executor can call."""

import os
import signal
import time
from pathlib import Path

import torch

from headwise.errors import HeadwiseError


def square(number: int) -> int:
    return number * number


def threads(_: int) -> int:
    return torch.get_num_threads()


def process(_: int) -> int:
    time.sleep(0.2)
    return os.getpid()


def refuse(number: int) -> int:
    if number == 2:
        raise HeadwiseError("two is not taken; give another number.")
    return number


def note(folder: str, number: int) -> int:
    """Leaves a mark each time it is begun."""
    with open(Path(folder) / str(number), "a") as file:
        file.write("x")
    return number


def die_once(folder: str, number: int) -> int:
    """The third is killed in the middle, the first time."""
    note(folder, number)
    mark = Path(folder) / "killed"
    if number == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    return number


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
