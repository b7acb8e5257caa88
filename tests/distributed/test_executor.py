"""Jobs on executors: local processes, a real Dask cluster, local submitit jobs and custom executors."""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headwise.distributed.job_executors import FaultTolerantProcessPool, check_executor, run_jobs_as_completed
from headwise.errors import HeadwiseError
from tests.distributed import jobs


@contextmanager
def dask() -> Iterator[str]:
    """Start a cluster of two processes on this machine and return the address of its scheduler."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield f"dask:{cluster.scheduler_address}"


def slurm() -> str:
    pytest.importorskip("submitit")
    return "slurm:cluster=local"


def results(function: Any, arguments: list, **options: Any) -> list:
    by_index = dict(
        run_jobs_as_completed(
            function, [value if isinstance(value, tuple) else (value,) for value in arguments], **options
        )
    )
    return [by_index[index] for index in range(len(arguments))]


@pytest.mark.slow
def test_work_processes_give_all_results(tmp_path: Path) -> None:
    assert results(jobs.square, [1, 2, 3, 4, 5], processes=2) == [1, 4, 9, 16, 25]
    assert results(jobs.threads, [0, 1], processes=2) == [1, 1]
    assert len(set(results(jobs.process_of_two, [(str(tmp_path), index) for index in range(4)], processes=2))) == 2
    assert len(set(results(jobs.process, [0, 1, 2], processes=1, fresh_process=True))) == 3
    assert results(jobs.square, [], processes=2) == []


def test_work_killed_worker_repeats_only_its_job(tmp_path: Path) -> None:
    arguments = [(str(tmp_path), index) for index in range(6)]
    assert results(jobs.die_once, arguments, processes=2) == list(range(6))
    starts = [len((tmp_path / str(index)).read_text()) for index in range(6)]
    assert starts == [1, 1, 2, 1, 1, 1], "other jobs were not affected"


@pytest.mark.slow
def test_work_worker_always_dying_raises() -> None:
    with pytest.raises(HeadwiseError, match="ended before its job was done"):
        results(jobs.die, [0], processes=1)


@pytest.mark.slow
def test_work_headwise_error_is_raised() -> None:
    with pytest.raises(HeadwiseError, match="two is not taken"):
        results(jobs.raise_on_two, [1, 2, 3], processes=1)


def test_work_own_executor_stays_open() -> None:
    with ThreadPoolExecutor(2) as own:
        assert results(jobs.square, [1, 2, 3], executor=own) == [1, 4, 9]
        assert results(jobs.threads, [0], executor=own) == [1]
        assert own.submit(jobs.square, 4).result() == 16
    assert isinstance(FaultTolerantProcessPool(1), Executor)


@pytest.mark.slow
def test_work_dask_cluster_gives_all_results(tmp_path: Path) -> None:
    with dask() as executor:
        assert results(jobs.square, [1, 2, 3, 4], executor=executor) == [1, 4, 9, 16]
        assert results(jobs.threads, [0], executor=executor) == [1]
        with pytest.raises(HeadwiseError, match="two is not taken"):
            results(jobs.raise_on_two, [1, 2, 3], executor=executor)


@pytest.mark.slow
def test_work_dask_killed_worker_repeats_job(tmp_path: Path) -> None:
    with dask() as executor:
        arguments = [(str(tmp_path), index) for index in range(6)]
        assert results(jobs.die_once, arguments, executor=executor) == list(range(6))
    assert len((tmp_path / "2").read_text()) == 2


@pytest.mark.slow
def test_work_slurm_local_jobs_give_all_results(tmp_path: Path) -> None:
    assert results(jobs.square, [3, 4], executor=slurm(), folder=tmp_path) == [9, 16]
    assert any((tmp_path / "jobs").iterdir())


@pytest.mark.slow
def test_work_slurm_failed_jobs_raise_or_repeat(tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match=r"^two is not taken"):
        results(jobs.raise_on_two, [1, 2], executor=slurm(), folder=tmp_path)
    arguments = [(str(tmp_path), index) for index in range(4)]
    assert results(jobs.die_once, arguments, executor=slurm(), folder=tmp_path) == list(range(4))
    with pytest.raises(HeadwiseError, match="ended before it was done"):
        results(jobs.die, [0], executor=slurm(), folder=tmp_path)
    import submitit

    own = submitit.LocalExecutor(tmp_path / "own")
    own.update_parameters(timeout_min=5)
    assert results(jobs.square, [5], executor=own) == [25], "with its own settings"


@pytest.mark.parametrize("wrong", ["ray", "Dask", 3, "", "dusk:tcp://a"])
def test_check_executor_unknown_raises(wrong: Any) -> None:
    with pytest.raises(HeadwiseError, match=r"unknown executor.*processes, dask, slurm"):
        check_executor(wrong)


def test_work_unreachable_executor_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    from dask import config

    with (
        config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(HeadwiseError, match=r"no Dask scheduler answers at 'tcp://127\.0\.0\.1:9'"),
    ):
        results(jobs.square, [1], executor="dask:tcp://127.0.0.1:9")
    for wrong in ("slurm", "slurm:cluster=moon", "slurm:cluster=local,timeout_min=soon"):
        with pytest.raises(HeadwiseError, match="Slurm cannot be used"):
            results(jobs.square, [1], executor=wrong, folder=tmp_path)
    with pytest.raises(HeadwiseError, match="processes: must be at least 1"):
        results(jobs.square, [1], processes=0)
    for kind, package in (("dask", "distributed"), ("slurm", "submitit")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(HeadwiseError, match=rf"{package} package: pip install 'headwise\[{kind}\]'"):
            results(jobs.square, [1], executor=kind, folder=tmp_path)
