"""Work that does not run in step: jobs handed to any `concurrent.futures.Executor`, one thread each.

Results do not hang on how many workers there are, or where: each job has one thread, and is named by what decides it, so that
doing it twice gives the same.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError

KINDS = ("processes", "dask", "slurm")
GRACE = 15.0  # seconds a process has to save what it is at
TICK = 0.5  # seconds between looks at how far they are
KILLED = (
    "a process ended before it was done. If it was killed for want of memory, run the same again with fewer processes; if "
    'this is a script, begin what it does with `if __name__ == "__main__":`, as other processes read the script too.'
)
_one = threading.Lock()  # threads of one worker would share torch's random numbers


def work(
    function: Callable[..., Any],
    jobs: Sequence[tuple],
    processes: int | None = None,
    look: Callable[[], None] | None = None,
    fresh: bool = False,
    executor: "Executor | str | None" = None,
    folder: Path | None = None,
) -> Iterator[tuple[int, Any]]:
    """Call a function of some module with each job, elsewhere; yields the job's number and what it gave, as they are done.

    `executor`: None, so many processes here; "dask", "slurm", with settings behind a colon; or one of your own, which stays
    open. With `fresh`, each job of a process here has one that did nothing before, so that what it holds at most is its own.
    `folder`: where Slurm's jobs are written, seen by all machines.
    """
    with _open(executor, processes, max(1, len(jobs)), fresh, folder) as pool:
        call = function if isinstance(pool, Processes) else partial(_steady, function)
        running: dict[Future, int] = {pool.submit(call, *job): i for i, job in enumerate(jobs)}
        try:
            while running:
                done, _ = wait(running, TICK, FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
                if look is not None:
                    look()
        except BrokenExecutor:
            raise HeadwiseError(KILLED) from None
        except BaseException as error:
            for future in running:
                future.cancel()
            if isinstance(pool, Processes):
                pool.stop(GRACE if isinstance(error, KeyboardInterrupt) else 0)
            raise


def check_executor(executor: "Executor | str | None") -> None:
    """Whether there is such an executor; asked before long work."""
    if executor is None or isinstance(executor, Executor) or _is_queue(executor):
        return
    if not isinstance(executor, str) or executor.partition(":")[0] not in KINDS:
        raise HeadwiseError(
            f"there is no executor {executor!r}; use {', '.join(KINDS)}, or give a concurrent.futures.Executor."
        )


def _open(
    executor: "Executor | str | None", processes: int | None, jobs: int, fresh: bool, folder: Path | None
) -> AbstractContextManager[Executor]:
    check_executor(executor)
    if isinstance(executor, Executor):
        return nullcontext(executor)
    if executor is not None and not isinstance(executor, str):
        return nullcontext(Jobs(executor))
    kind, _, settings = (executor or KINDS[0]).partition(":")
    if kind == "dask":
        return _dask(settings)
    if kind == "slurm":
        return Jobs(_queue(settings, (folder or Path.cwd()) / "jobs"))
    processes = os.cpu_count() or 1 if processes is None else processes
    if processes < 1:
        raise HeadwiseError(f"work needs at least one process, got {processes}.")
    return Processes(min(processes, jobs), fresh)


def _steady(function: Callable[..., Any], *job: Any) -> Any:
    """One job at a time in a worker of somebody else's, on one thread."""
    with _one:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*job)
        finally:
            torch.set_num_threads(before)


# Processes here.


class Processes(Executor):
    """So many processes. Each is a pool of its own, so that one that dies takes nobody else's work along; what it was at is
    begun once more."""

    def __init__(self, count: int, fresh: bool = False) -> None:
        self._threads, self._mine, self._fresh = ThreadPoolExecutor(count), threading.local(), fresh
        self._before, self._closing = set(active_children()), False
        self._pools: list[ProcessPoolExecutor] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """As any executor does."""
        return self._threads.submit(self._run, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the processes go."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)
        for pool in self._pools:
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def stop(self, grace: float) -> None:
        """Have those at work save and stop. Ctrl-C told them already, and a second word would be obeyed without saving: so
        they are given time, then told, and at last killed."""
        self._closing = True
        self.shutdown(wait=False, cancel_futures=True)
        children = set(active_children()) - self._before
        for seconds, tell in ((grace, BaseProcess.terminate), (GRACE, BaseProcess.kill)):
            end = time.monotonic() + seconds
            for child in children:
                child.join(max(0.0, end - time.monotonic()))
            for child in children:
                if child.is_alive():
                    tell(child)

    def _run(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        for last in (False, True):
            try:
                return self._pool().submit(function, *args, **kwargs).result()
            except BrokenExecutor:
                self._mine.pool = None
                if last or self._closing:
                    raise
        raise AssertionError

    def _pool(self) -> ProcessPoolExecutor:
        if getattr(self._mine, "pool", None) is None:
            self._mine.pool = ProcessPoolExecutor(
                1, get_context("spawn"), _begin, max_tasks_per_child=1 if self._fresh else None
            )
            self._pools.append(self._mine.pool)
        return self._mine.pool


def _begin() -> None:
    """One thread for the work, and one that waits for whoever began it to die: then what is being trained is saved."""
    torch.set_num_threads(1)

    def follow() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True).start()


# Dask.


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    """Workers of a Dask cluster: at an address, at the one its settings name, or some on this machine."""
    try:
        from distributed import Client
    except ImportError:
        raise HeadwiseError("the executor dask needs the distributed package: pip install 'headwise[dask]'.") from None
    try:
        client = Client(address) if address else Client(threads_per_worker=1, dashboard_address=None)
    except (OSError, ValueError) as error:
        raise HeadwiseError(f"no Dask scheduler answers at {address!r} ({error}); start one: dask scheduler.") from None
    with client:
        yield client.get_executor(pure=False)


# Slurm, through submitit (https://github.com/facebookincubator/submitit), which pickles what is called and what it gives.


def _queue(settings: str, folder: Path) -> Any:
    """submitit's executor: `partition=long,timeout_min=600`; `cluster=local` runs jobs on this machine."""
    try:
        import submitit
    except ImportError:
        raise HeadwiseError("the executor slurm needs the submitit package: pip install 'headwise[slurm]'.") from None
    parts = [one.partition("=") for one in settings.split(",") if one]
    asked = {name: value for name, _, value in parts}
    cluster = asked.pop("cluster", "slurm")
    shared = submitit.AutoExecutor._typed_parameters()
    try:
        queue = submitit.AutoExecutor(folder, cluster)
        given = {name if name in shared else f"{cluster}_{name}": _value(value) for name, value in asked.items()}
        queue.update_parameters(**{"timeout_min": 24 * 60, "name": "headwise", **given})
    except (AssertionError, RuntimeError, ValueError, TypeError, NameError) as error:
        raise HeadwiseError(
            f"Slurm cannot be asked ({error}); this must be a machine that has srun, or say slurm:cluster=local."
        ) from None
    return queue


def _value(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _is_queue(executor: Any) -> bool:
    """Whether it is one of submitit's executors, which are no `concurrent.futures.Executor`."""
    return any(kind.__module__.startswith("submitit.") for kind in type(executor).__mro__)


class Jobs(Executor):
    """submitit's jobs as futures. One that died is asked for once more."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._open: list[tuple[Future, Callable[[], Any], Any, bool]] = []
        self._lock, self._closing = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """As any executor does."""
        future, ask = Future(), partial(self._queue.submit, _outcome, fn, args, kwargs)
        future.set_running_or_notify_cancel()
        with self._lock:
            self._open.append((future, ask, ask(), False))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take back what is not done."""
        self._closing.set()
        with self._lock:
            for _, _, job, _ in self._open:
                job.cancel()
            self._open.clear()

    def _watch(self) -> None:
        while not self._closing.wait(TICK):
            with self._lock:
                some, self._open = self._open, []
            self._keep(self._look(*one) for one in some)

    def _keep(self, still: Iterable[tuple | None]) -> None:
        for one in still:
            if one is not None and self._closing.is_set():
                one[2].cancel()
            elif one is not None:
                with self._lock:
                    self._open.append(one)

    def _look(self, future: Future, ask: Callable[[], Any], job: Any, again: bool) -> tuple | None:
        """What is still open of a job."""
        from submitit.core.utils import UncompletedJobError

        if not job.done():
            return future, ask, job, again
        try:
            told = job.result()
        except UncompletedJobError as error:
            if not again:
                return future, ask, ask(), True
            future.set_exception(HeadwiseError(f"a job of Slurm's ended before it was done: {error}"))
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_exception(HeadwiseError(told[0])) if told[0] else future.set_result(told[1])
        return None


def _outcome(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[str, Any]:
    """What a job gave, or an error a person can put right, which submitit would wrap in a traceback."""
    try:
        return "", function(*args, **kwargs)
    except HeadwiseError as error:
        return str(error), None
