"""Runs that are killed, each in a process of its own, forked here so that it starts at once.

python -m tests.training.kill_script by-event FOLDER FIRST STEP     a fresh run per file event, killed there, then finished
python -m tests.training.kill_script at-random FOLDER KILLS SEED    one run, killed at random moments until it has finished
python -m tests.training.kill_script while-writing FOLDER KILLS     one run, killed while a checkpoint is being written
Prints what happened as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch._dynamo  # noqa: F401  what a first step would import, so that each process need not

from tests.training.tiny import NOISY, SHORT, run

QUICK = replace(SHORT, steps=4, save_every=1, keep=1, evaluate_every=2, log_every=1)
LONG = replace(SHORT, steps=30, save_every=1, evaluate_every=5)
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def forked(work: Callable[[], object]) -> int:
    """Start a process; its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(event: int, folder: Path) -> None:
    """This process dies as it does something with a file of the folder for the nth time."""
    left = event

    def hook(name: str, arguments: tuple) -> None:
        nonlocal left
        if name in EVENTS and any(str(folder) in str(argument) for argument in arguments[:2]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def by_event(folder: Path, first: int, step: int) -> dict[str, object]:
    event, codes = first, {}
    while True:
        out = folder / str(event)

        def killed(event: int = event, out: Path = out) -> None:
            kill_at(event, out)
            run(NOISY, QUICK, out)

        code = ended(forked(killed))
        if code != -signal.SIGKILL:
            return {"events": event, "last": code, "codes": codes}
        codes[event] = ended(forked(lambda out=out: run(NOISY, QUICK, out)))
        event += step


def hidden(out: Path) -> bool:
    return any((out / "checkpoints").glob(".*"))


def repeat(out: Path, kills: int, wait: Callable[[int], None]) -> dict[str, object]:
    """Start, wait, kill; the last time let it finish. A run that finishes too soon is done again from its start."""
    done = writing = 0
    while done < kills:
        child = forked(lambda: run(NOISY, LONG, out))
        wait(child)
        os.kill(child, signal.SIGKILL)
        if ended(child) != -signal.SIGKILL:
            break
        done += 1
        writing += hidden(out)
    return {"kills": done, "writing": writing, "last": ended(forked(lambda: run(NOISY, LONG, out)))}


def at_random(out: Path, kills: int, seed: int) -> dict[str, object]:
    dice = random.Random(seed)
    return repeat(out, kills, lambda child: time.sleep(dice.uniform(0.0, 0.35)))


def while_writing(out: Path, kills: int) -> dict[str, object]:
    def wait(child: int) -> None:
        left_behind = set((out / "checkpoints").glob(".*"))
        until = time.monotonic() + 60
        while time.monotonic() < until and not set((out / "checkpoints").glob(".*")) - left_behind:
            pass

    return repeat(out, kills, wait)


def main() -> None:
    how, folder, *numbers = sys.argv[1:]
    works = {"by-event": by_event, "at-random": at_random, "while-writing": while_writing}
    sys.stdout.write(json.dumps(works[how](Path(folder), *map(int, numbers))) + "\n")


if __name__ == "__main__":
    main()
