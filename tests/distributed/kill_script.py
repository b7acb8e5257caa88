"""A run of two processes in which one is killed again and again; forked here, so that they start at once.

python -m tests.distributed.kill_script FOLDER NAME PARALLEL STEPS KILLS SEED

Each time the process that is killed and the moment are drawn: within one and a half times as long as a step and its
checkpoint took, so after three steps at most. The other must notice by itself. The last time they are let finish. Then a
run that nobody disturbs, in FOLDER-whole. Prints what happened as JSON.
"""

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # what a first step would import, so that each process need not
import torch.distributed as dist

import headwise as hw
from headwise.training import train
from tests.distributed.train_checks import RECIPE, SPECS
from tests.training.tiny import TEXT

NOTICED = 3  # the code of a process that was told the other is gone
PATIENCE = 90.0  # seconds for a run that is killed
WHOLE = 600.0  # and for one that is let finish: a busy machine takes long


def member(rank: int, meeting: str, work: Callable[[], object]) -> int:
    """Start one of two processes; its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
        )
        work()
        code = 0
    except hw.HeadwiseError as error:
        sys.stderr.write(f"{error}\n")
        code = NOTICED
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def waited(child: int, until: float) -> int | None:
    """How a process ended; None where it did not, and had to be ended."""
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    folder, name, parallel, *numbers = sys.argv[1:]
    steps, kills, seed = map(int, numbers)
    recipe = replace(RECIPE, steps=steps, save_every=1, evaluate_every=4, parallel=parallel)  # pyright: ignore
    dice, ends, longest = random.Random(seed), list[Any](), 0.0

    def attempt(victim: int, moment: float, out: str = folder) -> list[int | None]:
        steps = list[float]()

        def look(model: hw.Transformer, step: int) -> None:
            steps.append(time.monotonic())
            if len(steps) == 2 and dist.get_rank() == victim:
                seconds = moment * (steps[1] - steps[0])
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

        def work() -> None:
            train(SPECS[name], TEXT, recipe, out=out, call=look, every=1, progress=False)

        meeting = tempfile.mktemp(prefix="kill-")
        children = [member(rank, meeting, work) for rank in range(2)]
        nonlocal longest
        patience = PATIENCE if victim >= 0 else WHOLE
        first = waited(children[max(victim, 0)], time.monotonic() + patience)
        began = time.monotonic()
        other = waited(children[1 - max(victim, 0)], time.monotonic() + patience)
        longest = max(longest, time.monotonic() - began)
        return [first, other]

    for _ in range(kills):
        ends.append(attempt(dice.randrange(2), dice.uniform(0.0, 1.5)))
    last, noticed = attempt(-1, 0.0), longest
    whole = attempt(-1, 0.0, f"{folder}-whole")
    sys.stdout.write(json.dumps({"ends": ends, "last": last, "whole": whole, "longest": noticed}) + "\n")


if __name__ == "__main__":
    main()
