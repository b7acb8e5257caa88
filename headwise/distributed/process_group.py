"""Several processes, one training: who I am, and how numbers are shared. Started by torchrun; alone, nothing happens."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from headwise.errors import HeadwiseError
from headwise.kernels.collectives import COLLECTIVE_TIMEOUT, call_collective


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that share out the rows of a batch, or texts. Where others read the same, `world` are all."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # None: all that there are
    world: "ProcessGroup | None" = None

    @property
    def all_processes(self) -> "ProcessGroup":
        """All processes, those too that read the same rows."""
        return self if self.world is None else self.world

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.all_processes.rank == 0

    def wrap_ddp(self, module: nn.Module, find_unused: bool) -> nn.Module:
        """Let gradients be averaged over the team (https://arxiv.org/abs/2006.15704)."""
        if self.size == 1:
            return module
        device_ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=device_ids, find_unused_parameters=find_unused)

    def all_reduce_values(self, *values: float) -> list[float]:
        """Sums over the team."""
        if self.size == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64, device=self.device)
        call_collective(lambda: dist.all_reduce(reduced, group=self.group))
        return reduced.tolist()

    def all_reduce_inplace(self, values: np.ndarray) -> None:
        """Sums over the team, in place."""
        if self.size > 1:
            reduced = torch.from_numpy(values).to(self.device)
            call_collective(lambda: dist.all_reduce(reduced, group=self.group))
            values[...] = reduced.cpu().numpy()

    def check_equal(self, value: str, message: str) -> None:
        """Refuse to go on, in every process, where they were given different things."""
        if self.all_processes.size > 1:
            digests = np.zeros((self.all_processes.size, 32))
            digests[self.all_processes.rank] = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
            self.all_processes.all_reduce_inplace(digests)
            if (digests != digests[0]).any():
                raise HeadwiseError(message)

    def run_on_rank_zero(self, action: Callable[[], object]) -> None:
        """What the first process does for all, while the others wait; what is refused there is refused everywhere."""
        failure: HeadwiseError | None = None
        if self.is_rank_zero:
            try:
                action()
            except HeadwiseError as error:
                failure = error
        if self.all_processes.size > 1:
            messages = [None if failure is None else str(failure)]
            call_collective(lambda: dist.broadcast_object_list(messages, 0))
            failure = HeadwiseError(messages[0]) if failure is None and messages[0] is not None else failure
        if failure is not None:
            raise failure

    def barrier(self) -> None:
        """Until all are here."""
        if self.all_processes.size > 1:
            call_collective(dist.barrier)


def is_rank_zero() -> bool:
    """Whether this is the process that looks and speaks for all that torchrun started; before they have met."""
    return not int(os.environ.get("RANK", "0"))


@contextmanager
def init_distributed(device: str | torch.device | None, single_process: bool = False) -> Iterator[ProcessGroup]:
    """The team that torchrun started, or a team of one; `single_process`: of one, since all do the same work together."""
    if single_process:
        yield ProcessGroup(0, 1, torch.device(device or "cpu"))
        return
    size = int(os.environ.get("WORLD_SIZE", "1"))
    started = False
    if size > 1 and not dist.is_initialized():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        on_gpu = torch.cuda.is_available() and str(device or "cuda").startswith("cuda")
        if on_gpu:
            device = f"cuda:{local_rank}"
            torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=COLLECTIVE_TIMEOUT)
        started = True
    try:
        target_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=target_device)
    except (RuntimeError, AssertionError) as error:
        raise HeadwiseError(f"the device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    try:
        initialized = dist.is_initialized()
        yield ProcessGroup(
            dist.get_rank() if initialized else 0, dist.get_world_size() if initialized else 1, target_device
        )
    finally:
        if started:
            dist.destroy_process_group()
