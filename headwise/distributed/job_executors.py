"""Run independent jobs on any `concurrent.futures.Executor`, with one thread per job.

Results do not depend on the number or the location of the workers. A job is identified by its arguments, so that repeating it
gives the same result.
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

from headwise.errors import ArgumentError, HeadwiseError, MissingDependencyError

EXECUTOR_KINDS = ("processes", "dask", "slurm")
GRACE_SECONDS = 15.0  # time for a process to save its state
POLL_SECONDS = 0.5  # time between polls
KILLED_MESSAGE = (
    "processes: a worker process ended before its job was done. If it ran out of memory, run the command again with fewer "
    'processes. In a script, put the code under `if __name__ == "__main__":`, because worker processes import the script.'
)
_job_lock = threading.Lock()  # threads of one worker would share the RNG state of torch


def run_jobs_as_completed(
    function: Callable[..., Any],
    jobs: Sequence[tuple],
    processes: int | None = None,
    on_poll: Callable[[], None] | None = None,
    *,
    fresh_process: bool = False,
    executor: "Executor | str | None" = None,
    folder: Path | None = None,
) -> Iterator[tuple[int, Any]]:
    """Call a function with each job in worker processes. Yield (job index, result) as jobs complete.

    Args:
        function: Function of an importable module.
        jobs: Arguments of each call.
        processes: Number of local processes. None: one per CPU.
        on_poll: Called about twice per second while jobs run.
        fresh_process: Run each local job in a new process, for example to measure its peak memory.
        executor: None for local processes, "dask" or "slurm" with optional settings after a colon, or an executor object,
            which stays open.
        folder: Folder for the files of Slurm jobs, visible to all machines. None: the current directory.

    Yields:
        Index of a job and its result.

    Raises:
        HeadwiseError: If a worker process is killed twice.
    """
    with _open_executor(executor, processes, max(1, len(jobs)), fresh_process=fresh_process, folder=folder) as pool:
        call = function if isinstance(pool, FaultTolerantProcessPool) else partial(_run_single_threaded, function)
        running: dict[Future, int] = {pool.submit(call, *job): i for i, job in enumerate(jobs)}
        try:
            while running:
                done, _ = wait(running, POLL_SECONDS, FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
                if on_poll is not None:
                    on_poll()
        except BrokenExecutor:
            raise HeadwiseError(KILLED_MESSAGE) from None
        except BaseException as error:
            for future in running:
                future.cancel()
            if isinstance(pool, FaultTolerantProcessPool):
                pool.stop(GRACE_SECONDS if isinstance(error, KeyboardInterrupt) else 0)
            raise


def run_in_subprocess(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of an importable module in a new process with all threads, for example to measure its memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenExecutor:
            raise HeadwiseError(KILLED_MESSAGE) from None


def check_executor(executor: "Executor | str | None") -> None:
    """Raise if the executor is unknown. Called before long computations."""
    if executor is None or isinstance(executor, Executor) or _is_submitit_executor(executor):
        return
    if not isinstance(executor, str) or executor.partition(":")[0] not in EXECUTOR_KINDS:
        raise ArgumentError(
            f"executor: unknown executor. Got {executor!r}. "
            f"Use one of {', '.join(EXECUTOR_KINDS)}, or a concurrent.futures.Executor."
        )


def _open_executor(
    executor: "Executor | str | None", processes: int | None, jobs: int, *, fresh_process: bool, folder: Path | None
) -> AbstractContextManager[Executor]:
    check_executor(executor)
    if isinstance(executor, Executor):
        return nullcontext(executor)
    if executor is not None and not isinstance(executor, str):
        return nullcontext(SlurmExecutor(executor))
    kind, _, settings = (executor or EXECUTOR_KINDS[0]).partition(":")
    if kind == "dask":
        return _dask_executor(settings)
    if kind == "slurm":
        return SlurmExecutor(_submitit_executor(settings, (folder or Path.cwd()) / "jobs"))
    processes = os.cpu_count() or 1 if processes is None else processes
    if processes < 1:
        raise ArgumentError(f"processes: must be at least 1. Got {processes}. Use None for one process per CPU.")
    return FaultTolerantProcessPool(min(processes, jobs), fresh_process)


def _run_single_threaded(function: Callable[..., Any], *job: Any) -> Any:
    """Run one job at a time on one thread in a worker of an external executor."""
    with _job_lock:
        saved_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*job)
        finally:
            torch.set_num_threads(saved_threads)


# Local processes.


class FaultTolerantProcessPool(Executor):
    """Pool of `count` processes. Each is a pool of its own, so that a process that dies does not affect other jobs. Its job
    is started once more."""

    def __init__(self, count: int, fresh_process: bool = False) -> None:
        self._thread_pool, self._thread_local, self._fresh_process = (
            ThreadPoolExecutor(count),
            threading.local(),
            fresh_process,
        )
        self._existing_children, self._closing = set(active_children()), False
        self._pools: list[ProcessPoolExecutor] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Submit a job, as in `concurrent.futures.Executor`."""
        return self._thread_pool.submit(self._run, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down the processes."""
        self._thread_pool.shutdown(wait, cancel_futures=cancel_futures)
        for pool in self._pools:
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def stop(self, grace: float) -> None:
        """Let running jobs save their state, then terminate and finally kill their processes.

        Ctrl-C has already signaled the processes, and a second signal would stop them without saving. So they get `grace`
        seconds first.
        """
        self._closing = True
        self.shutdown(wait=False, cancel_futures=True)
        children = set(active_children()) - self._existing_children
        for seconds, end_process in ((grace, BaseProcess.terminate), (GRACE_SECONDS, BaseProcess.kill)):
            deadline = time.monotonic() + seconds
            for child in children:
                child.join(max(0.0, deadline - time.monotonic()))
            for child in children:
                if child.is_alive():
                    end_process(child)

    def _run(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        for is_last_try in (False, True):
            try:
                return self._pool().submit(function, *args, **kwargs).result()
            except BrokenExecutor:
                self._thread_local.pool = None
                if is_last_try or self._closing:
                    raise
        raise AssertionError

    def _pool(self) -> ProcessPoolExecutor:
        if getattr(self._thread_local, "pool", None) is None:
            self._thread_local.pool = ProcessPoolExecutor(
                1, get_context("spawn"), _init_worker, max_tasks_per_child=1 if self._fresh_process else None
            )
            self._pools.append(self._thread_local.pool)
        return self._thread_local.pool


def _init_worker() -> None:
    """Use one thread, and terminate this process if its parent dies, so that a training run is saved."""
    torch.set_num_threads(1)

    def exit_with_parent() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=exit_with_parent, daemon=True).start()


# Dask.


@contextmanager
def _dask_executor(address: str) -> Iterator[Executor]:
    """Return an executor of a Dask cluster: at an address, at the address of its settings, or on this machine."""
    try:
        from distributed import Client
    except ImportError:
        raise MissingDependencyError(
            "executor: dask needs the distributed package: pip install 'headwise[dask]'."
        ) from None
    try:
        client = Client(address) if address else Client(threads_per_worker=1, dashboard_address=None)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"executor: no Dask scheduler answers at {address!r} ({error}). Start one: dask scheduler."
        ) from None
    with client:
        yield client.get_executor(pure=False)


# Slurm, through submitit (https://github.com/facebookincubator/submitit), which pickles functions and results.


def _submitit_executor(settings: str, folder: Path) -> Any:
    """Return a submitit executor. Settings: `partition=long,timeout_min=600`; `cluster=local` runs jobs on this machine."""
    try:
        import submitit
    except ImportError:
        raise MissingDependencyError(
            "executor: slurm needs the submitit package: pip install 'headwise[slurm]'."
        ) from None
    parts = [setting.partition("=") for setting in settings.split(",") if setting]
    options = {name: value for name, _, value in parts}
    cluster = options.pop("cluster", "slurm")
    shared_names = submitit.AutoExecutor._typed_parameters()
    try:
        queue = submitit.AutoExecutor(folder, cluster)
        parameters = {
            name if name in shared_names else f"{cluster}_{name}": _int_or_text(value)
            for name, value in options.items()
        }
        queue.update_parameters(**{"timeout_min": 24 * 60, "name": "headwise", **parameters})
    except (AssertionError, RuntimeError, ValueError, TypeError, NameError) as error:
        raise ArgumentError(
            f"executor: Slurm cannot be used ({error}). Run this on a machine with srun, or use slurm:cluster=local."
        ) from None
    return queue


def _int_or_text(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _is_submitit_executor(executor: Any) -> bool:
    """Return whether this is a submitit executor, which does not derive from `concurrent.futures.Executor`."""
    return any(base.__module__.startswith("submitit.") for base in type(executor).__mro__)


class SlurmExecutor(Executor):
    """Submitit jobs as futures. A job that died is submitted once more."""

    def __init__(self, submitit_executor: Any) -> None:
        self._submitit = submitit_executor
        self._pending: list[tuple[Future, Callable[[], Any], Any, bool]] = []
        self._lock, self._closing = threading.Lock(), threading.Event()
        threading.Thread(target=self._poll_jobs, daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Submit a job, as in `concurrent.futures.Executor`."""
        future, submit_job = Future(), partial(self._submitit.submit, _run_catching, fn, args, kwargs)
        future.set_running_or_notify_cancel()
        with self._lock:
            self._pending.append((future, submit_job, submit_job(), False))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel jobs that are not done."""
        self._closing.set()
        with self._lock:
            for _, _, job, _ in self._pending:
                job.cancel()
            self._pending.clear()

    def _poll_jobs(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            with self._lock:
                pending, self._pending = self._pending, []
            self._requeue(self._poll_job(*entry) for entry in pending)

    def _requeue(self, entries: Iterable[tuple | None]) -> None:
        for entry in entries:
            if entry is not None and self._closing.is_set():
                entry[2].cancel()
            elif entry is not None:
                with self._lock:
                    self._pending.append(entry)

    def _poll_job(self, future: Future, submit_job: Callable[[], Any], job: Any, retried: bool) -> tuple | None:
        """Return the entry of a job that is still pending, or None."""
        from submitit.core.utils import UncompletedJobError

        if not job.done():
            return future, submit_job, job, retried
        try:
            outcome = job.result()
        except UncompletedJobError as error:
            if not retried:
                return future, submit_job, submit_job(), True
            future.set_exception(
                HeadwiseError(
                    f"executor: a Slurm job ended before it was done, twice ({error}). Check its log and run again."
                )
            )
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_exception(HeadwiseError(outcome[0])) if outcome[0] else future.set_result(outcome[1])
        return None


def _run_catching(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[str, Any]:
    """Return the result of a job, or the message of its HeadwiseError, which submitit would wrap in a traceback."""
    try:
        return "", function(*args, **kwargs)
    except HeadwiseError as error:
        return str(error), None
