"""Points trained in several processes, or by any executor: what is in the store is not trained again."""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from headwise.distributed.executor import KILLED, work
from headwise.errors import HeadwiseError
from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.store import Store
from headwise.experiments.engine.train_model import make
from headwise.progress import Progress
from headwise.training.run_folder import METRICS


def train_all(
    points: Sequence[Point],
    store: Store,
    processes: int | None = None,
    progress: Progress | None = None,
    executor: Executor | str | None = None,
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

    for _ in work(_train, jobs, processes, look, fresh=True, executor=executor, folder=store.folder):
        look()


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of some module in a fresh process, with all threads: for what it takes there alone, as memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise HeadwiseError(KILLED) from None


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
