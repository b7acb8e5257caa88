"""A run of two forked processes, one of which is killed repeatedly.

python -m tests.distributed.kill_script FOLDER NAME PARALLEL STEPS KILLS SEED

The killed process and the time are random: within 1.5 times the duration of a step and its checkpoint, so after at most three
steps. The other process must notice it. The last run finishes, followed by an uninterrupted run in FOLDER-whole. Prints the
results as JSON.
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
import torch._dynamo  # a first step imports it; import it once, before forking
import torch.distributed as dist

import headwise as hw
from headwise.training import train
from tests.distributed.train_checks import RECIPE, SPECS
from tests.training.tiny import TEXT

PEER_LOST_CODE = 3  # exit code of a process that detected the loss of the other
KILLED_TIMEOUT = 90.0  # seconds for a run that is killed
FULL_TIMEOUT = 600.0  # seconds for a run that finishes, on a busy machine


def fork_worker(rank: int, rendezvous: str, work: Callable[[], object]) -> int:
    """Start one of two processes and return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
        )
        work()
        code = 0
    except hw.HeadwiseError as error:
        sys.stderr.write(f"{error}\n")
        code = PEER_LOST_CODE
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait_for_exit(child: int, until: float) -> int | None:
    """Return the exit code of a process, or None if it had to be killed."""
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    folder, name, parallel, *counts = sys.argv[1:]
    steps, kills, seed = map(int, counts)
    recipe = replace(RECIPE, steps=steps, save_every=1, evaluate_every=4, parallel=parallel)  # pyright: ignore
    rng, exit_codes, max_wait = random.Random(seed), list[Any](), 0.0

    def attempt(victim: int, moment: float, out: str = folder) -> list[int | None]:
        steps = list[float]()

        def on_step(model: hw.Transformer, step: int) -> None:
            steps.append(time.monotonic())
            if len(steps) == 2 and dist.get_rank() == victim:
                seconds = moment * (steps[1] - steps[0])
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

        def work() -> None:
            train(SPECS[name], TEXT, recipe, out=out, callback=on_step, callback_every=1, progress=False)

        rendezvous = tempfile.mktemp(prefix="kill-")
        children = [fork_worker(rank, rendezvous, work) for rank in range(2)]
        nonlocal max_wait
        timeout = KILLED_TIMEOUT if victim >= 0 else FULL_TIMEOUT
        first = wait_for_exit(children[max(victim, 0)], time.monotonic() + timeout)
        began = time.monotonic()
        other = wait_for_exit(children[1 - max(victim, 0)], time.monotonic() + timeout)
        max_wait = max(max_wait, time.monotonic() - began)
        return [first, other]

    for _ in range(kills):
        exit_codes.append(attempt(rng.randrange(2), rng.uniform(0.0, 1.5)))
    last, notice_time = attempt(-1, 0.0), max_wait
    uninterrupted = attempt(-1, 0.0, f"{folder}-whole")
    sys.stdout.write(
        json.dumps({"ends": exit_codes, "last": last, "whole": uninterrupted, "longest": notice_time}) + "\n"
    )


if __name__ == "__main__":
    main()
