"""Several processes: process groups, head parallelism, executors."""

from typing import TYPE_CHECKING

from headwise.lazy_import import lazy_names

if TYPE_CHECKING:
    from headwise.distributed.head_parallel import shard
    from headwise.distributed.process_group import ProcessGroup

__all__ = ["ProcessGroup", "shard"]

__getattr__ = lazy_names(__name__, {"head_parallel": ["shard"], "process_group": ["ProcessGroup"]})
