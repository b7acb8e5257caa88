"""Several processes: process groups, head parallelism, FSDP, sharded checkpoints, cost estimates, executors."""

from typing import TYPE_CHECKING

from headwise.lazy_import import make_lazy_getattr

if TYPE_CHECKING:
    from headwise.distributed.job_executors import check_executor, run_in_subprocess, run_jobs_as_completed
    from headwise.distributed.model_shard import shard
    from headwise.distributed.parallel_strategy_cost import layout
    from headwise.distributed.process_group import ProcessGroup

__all__ = ["ProcessGroup", "check_executor", "layout", "run_in_subprocess", "run_jobs_as_completed", "shard"]

__getattr__ = make_lazy_getattr(
    __name__,
    {
        "job_executors": ["check_executor", "run_in_subprocess", "run_jobs_as_completed"],
        "model_shard": ["shard"],
        "parallel_strategy_cost": ["layout"],
        "process_group": ["ProcessGroup"],
    },
)
