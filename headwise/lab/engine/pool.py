"""Work in several processes, one thread each: so that results do not hang on how many there are."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from headwise.errors import HeadwiseError
from headwise.lab.engine.make import make
from headwise.lab.engine.point import Point
from headwise.lab.engine.store import Store
from headwise.progress import Progress
from headwise.train.run import METRICS

GRACE = 15.0  # seconds a process has to save what it is at
TICK = 0.5  # seconds between looks at how far they are
KILLED = (
    "a process ended before it was done. If it was killed for want of memory, run the same again with fewer processes; if "
    'this is a script, begin what it does with `if __name__ == "__main__":`, as other processes read the script too.'
)


def train_all(
    points: Sequence[Point], store: Store, processes: int | None = None, progress: Progress | None = None
) -> None:
    """Train every point that is not in the store; stopped, and called again, it goes on with what is left."""
    todo = [point for point in dict.fromkeys(points) if store.made(point) is None]
    if not todo:
        return
    store.check_room(todo)
    todo.sort(key=_work, reverse=True)  # the longest first, so that none is left alone at the end
    steps = sum(point.recipe.steps for point in todo)
    jobs = [(point.to_json(), str(store.folder), store.place(point).name) for point in todo]

    def look() -> None:
        if progress is not None:
            progress(f"training {len(todo)} models", sum(_step(point, store) for point in todo), steps)

    for _ in work(_train, jobs, processes, look, fresh=True):
        look()


def work(
    function: Callable[..., Any],
    jobs: Sequence[tuple],
    processes: int | None = None,
    look: Callable[[], None] | None = None,
    fresh: bool = False,
) -> Iterator[tuple[int, Any]]:
    """Call a function of some module with each job, in other processes; yields the job's number and what it gave.

    With `fresh`, each job has a process that did nothing before, so that what it holds at most is its own.
    """
    processes = os.cpu_count() or 1 if processes is None else processes
    if processes < 1:
        raise HeadwiseError(f"work needs at least one process, got {processes}.")
    before = set(active_children())
    count, anew = min(processes, max(1, len(jobs))), 1 if fresh else None
    with ProcessPoolExecutor(count, get_context("spawn"), _begin, max_tasks_per_child=anew) as pool:
        running: dict[Future, int] = {pool.submit(function, *job): i for i, job in enumerate(jobs)}
        try:
            while running:
                done, _ = wait(running, TICK, FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
                if look is not None:
                    look()
        except BrokenProcessPool:
            raise HeadwiseError(KILLED) from None
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            _stop(set(active_children()) - before, GRACE if isinstance(error, KeyboardInterrupt) else 0)
            raise


def _stop(children: Iterable[BaseProcess], grace: float) -> None:
    """Have those at work save and stop. Ctrl-C told them already, and a second word would be obeyed without saving: so they
    are given time, then told, and at last killed."""
    for seconds, tell in ((grace, BaseProcess.terminate), (GRACE, BaseProcess.kill)):
        end = time.monotonic() + seconds
        for child in children:
            child.join(max(0.0, end - time.monotonic()))
        for child in children:
            if child.is_alive():
                tell(child)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of some module in a fresh process, with all threads: for what it takes there alone, as memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise HeadwiseError(KILLED) from None


def _begin() -> None:
    """One thread for the work, and one that waits for whoever began it to die: then what is being trained is saved."""
    torch.set_num_threads(1)

    def follow() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()


def _train(point: str, folder: str, name: str) -> None:
    asked, store = Point.from_json(point), Store(folder)
    check_same(store.place(asked).name, name)
    make(asked, store)


def check_same(here: str, there: str) -> None:
    """Whether another process names a thing as the one that began it: else the code or a text was changed meanwhile."""
    if here != there:
        raise HeadwiseError("the code or the text was changed while the lab was at work; run the same again.")


def _work(point: Point) -> float:
    """About how long a point takes: narrow heads are slow."""
    spec = point.spec
    return point.recipe.steps * point.recipe.batch * spec.layers * (spec.width + 2 * spec.attention.heads)


def _step(point: Point, store: Store) -> int:
    """How far a point is, by what it logged last."""
    if store.made(point) is not None:
        return point.recipe.steps
    try:
        with open(store.place(point) / METRICS, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 400))
            rows = file.read().splitlines()
        return int(json.loads(rows[-1])["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0  # not begun, or the line is being written
