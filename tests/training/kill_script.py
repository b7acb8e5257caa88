"""Runs that are killed. Each is a forked process, so that it starts fast.

python -m tests.training.kill_script by-event FOLDER FIRST STEP     a new run per file event, killed there, then finished
python -m tests.training.kill_script at-random FOLDER KILLS SEED    one run, killed at random times until it has finished
python -m tests.training.kill_script while-writing FOLDER KILLS     one run, killed while a checkpoint is being written
Prints the results as JSON.
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

FAST_RECIPE = replace(SHORT, steps=4, save_every=1, keep_checkpoints=1, evaluate_every=2, log_every=1)
LONG_RECIPE = replace(SHORT, steps=30, save_every=1, evaluate_every=5)
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def fork_process(function: Callable[[], object]) -> int:
    """Start a process and return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function()
        code = 0
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(event: int, folder: Path) -> None:
    """Kill this process at its nth operation on a file of the folder."""
    remaining = event

    def hook(name: str, arguments: tuple) -> None:
        nonlocal remaining
        if name in EVENTS and any(str(folder) in str(argument) for argument in arguments[:2]):
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_at_each_event(folder: Path, first: int, step: int) -> dict[str, object]:
    event, codes = first, {}
    while True:
        out = folder / str(event)

        def run_until_killed(event: int = event, out: Path = out) -> None:
            kill_at(event, out)
            run(NOISY, FAST_RECIPE, out)

        code = wait_exit_code(fork_process(run_until_killed))
        if code != -signal.SIGKILL:
            return {"events": event, "last": code, "codes": codes}
        codes[event] = wait_exit_code(fork_process(lambda out=out: run(NOISY, FAST_RECIPE, out)))
        event += step


def has_hidden_files(out: Path) -> bool:
    return any((out / "checkpoints").glob(".*"))


def kill_repeatedly(out: Path, kills: int, wait: Callable[[int], None]) -> dict[str, object]:
    """Start, wait and kill; let the last run finish. A run that finishes too soon starts again from the beginning."""
    done = writing = 0
    while done < kills:
        child = fork_process(lambda: run(NOISY, LONG_RECIPE, out))
        wait(child)
        os.kill(child, signal.SIGKILL)
        if wait_exit_code(child) != -signal.SIGKILL:
            break
        done += 1
        writing += has_hidden_files(out)
    return {
        "kills": done,
        "writing": writing,
        "last": wait_exit_code(fork_process(lambda: run(NOISY, LONG_RECIPE, out))),
    }


def kill_at_random(out: Path, kills: int, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    return kill_repeatedly(out, kills, lambda child: time.sleep(rng.uniform(0.0, 0.35)))


def kill_while_writing(out: Path, kills: int) -> dict[str, object]:
    def wait(child: int) -> None:
        old_files = set((out / "checkpoints").glob(".*"))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not set((out / "checkpoints").glob(".*")) - old_files:
            pass

    return kill_repeatedly(out, kills, wait)


def main() -> None:
    mode, folder, *numbers = sys.argv[1:]
    modes = {"by-event": kill_at_each_event, "at-random": kill_at_random, "while-writing": kill_while_writing}
    sys.stdout.write(json.dumps(modes[mode](Path(folder), *map(int, numbers))) + "\n")


if __name__ == "__main__":
    main()
