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
from headwise.kernels.collectives import PATIENCE, reached


@dataclass(frozen=True)
class Team:
    """The processes that share out the rows of a batch, or texts. Where others read the same, `world` are all."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # None: all that there are
    world: "Team | None" = None

    @property
    def everyone(self) -> "Team":
        """All processes, those too that read the same rows."""
        return self if self.world is None else self.world

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.everyone.rank == 0

    def wrap(self, module: nn.Module, unused: bool) -> nn.Module:
        """Let gradients be averaged over the team (https://arxiv.org/abs/2006.15704)."""
        if self.size == 1:
            return module
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids, find_unused_parameters=unused)

    def total(self, *numbers: float) -> list[float]:
        """Sums over the team."""
        if self.size == 1:
            return list(numbers)
        shared = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        reached(lambda: dist.all_reduce(shared, group=self.group))
        return shared.tolist()

    def add_up(self, numbers: np.ndarray) -> None:
        """Sums over the team, in place."""
        if self.size > 1:
            shared = torch.from_numpy(numbers).to(self.device)
            reached(lambda: dist.all_reduce(shared, group=self.group))
            numbers[...] = shared.cpu().numpy()

    def agree(self, what: str, otherwise: str) -> None:
        """Refuse to go on, in every process, where they were given different things."""
        if self.everyone.size > 1:
            digests = np.zeros((self.everyone.size, 32))
            digests[self.everyone.rank] = np.frombuffer(hashlib.sha256(what.encode()).digest(), np.uint8)
            self.everyone.add_up(digests)
            if (digests != digests[0]).any():
                raise HeadwiseError(otherwise)

    def first_alone(self, work: Callable[[], object]) -> None:
        """What the first process does for all, while the others wait; what is refused there is refused everywhere."""
        wrong: HeadwiseError | None = None
        if self.leads:
            try:
                work()
            except HeadwiseError as error:
                wrong = error
        if self.everyone.size > 1:
            told = [None if wrong is None else str(wrong)]
            reached(lambda: dist.broadcast_object_list(told, 0))
            wrong = HeadwiseError(told[0]) if wrong is None and told[0] is not None else wrong
        if wrong is not None:
            raise wrong

    def wait(self) -> None:
        """Until all are here."""
        if self.everyone.size > 1:
            reached(dist.barrier)


def is_first() -> bool:
    """Whether this is the process that looks and speaks for all that torchrun started; before they have met."""
    return not int(os.environ.get("RANK", "0"))


@contextmanager
def join_team(device: str | torch.device | None, alone: bool = False) -> Iterator[Team]:
    """The team that torchrun started, or a team of one; `alone`: of one, since all do the same work together."""
    if alone:
        yield Team(0, 1, torch.device(device or "cpu"))
        return
    size = int(os.environ.get("WORLD_SIZE", "1"))
    started = False
    if size > 1 and not dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        on_gpu = torch.cuda.is_available() and str(device or "cuda").startswith("cuda")
        if on_gpu:
            device = f"cuda:{local}"
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
        started = True
    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise HeadwiseError(f"the device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    try:
        together = dist.is_initialized()
        yield Team(dist.get_rank() if together else 0, dist.get_world_size() if together else 1, place)
    finally:
        if started:
            dist.destroy_process_group()
