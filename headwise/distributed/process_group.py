"""Process groups, and the collective operations on tensors that autograd can differentiate.

`ProcessGroup` describes the processes of a training run, which share the rows of a batch. torchrun starts them; a process
alone is a group of one. `ProcessGroupOps` has the collectives of processes that share the heads of a model. All of them
compute the same loss and its backward pass. A tensor is either replicated (equal in all processes, and so is its gradient) or
each process holds a part of it. Four operations convert between the two:

    copy_to_group   replicated → read by parts                     backward: sum of the gradients of all parts
    sum             parts that add up → replicated                 backward: identity
    gather          pieces → the full tensor, replicated           backward: the own piece
    local_slice     the full tensor, replicated → the own piece    backward: all pieces, gathered

All processes must call the collectives in the same order. If another process has ended, a HeadwiseError says so.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from headwise.errors import ArgumentError, HeadwiseError
from headwise.kernels.resolve_device import resolve_device

X = TypeVar("X")
COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # time that a process waits for another one


@dataclass(frozen=True)
class ProcessGroup:
    """Processes that share the rows of a batch, or texts.

    Attributes:
        rank: Rank of this process in the group.
        size: Number of processes in the group.
        device: Device of this process.
        group: The torch process group. None: the default group.
        world: All processes, if some of them process the same rows. None: this group.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    world: "ProcessGroup | None" = None

    @property
    def all_processes(self) -> "ProcessGroup":
        """All processes, including those that process the same rows."""
        return self if self.world is None else self.world

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes files and messages for all."""
        return self.all_processes.rank == 0

    def wrap_ddp(self, module: nn.Module, find_unused: bool) -> nn.Module:
        """Average gradients over the group (https://arxiv.org/abs/2006.15704)."""
        if self.size == 1:
            return module
        device_ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=device_ids, find_unused_parameters=find_unused)

    def all_reduce_values(self, *values: float) -> list[float]:
        """Return sums over the group."""
        if self.size == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64, device=self.device)
        call_collective(lambda: dist.all_reduce(reduced, group=self.group))
        return reduced.tolist()

    def all_reduce_array_inplace(self, values: np.ndarray) -> None:
        """Sum an array over the group, in place."""
        if self.size > 1:
            reduced = torch.from_numpy(values).to(self.device)
            call_collective(lambda: dist.all_reduce(reduced, group=self.group))
            values[...] = reduced.cpu().numpy()

    def check_equal(self, value: str, message: str) -> None:
        """Raise in every process if they have different values."""
        if self.all_processes.size > 1:
            digests = np.zeros((self.all_processes.size, 32))
            digests[self.all_processes.rank] = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
            self.all_processes.all_reduce_array_inplace(digests)
            if (digests != digests[0]).any():
                raise ArgumentError(message)

    def run_on_rank_zero(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank zero and return its result in all processes. Its HeadwiseError is raised in all of them."""
        failure: HeadwiseError | None = None
        result = None
        if self.is_rank_zero:
            try:
                result = action()
            except HeadwiseError as error:
                failure = error
        if self.all_processes.size > 1:
            messages = [None if failure is None else str(failure), result]
            call_collective(lambda: dist.broadcast_object_list(messages, 0))
            failure = HeadwiseError(messages[0]) if failure is None and messages[0] is not None else failure
            result = messages[1]
        if failure is not None:
            raise failure
        return result

    def barrier(self) -> None:
        """Wait until all processes have arrived."""
        if self.all_processes.size > 1:
            call_collective(dist.barrier)


def is_rank_zero() -> bool:
    """Return whether this process has rank zero, from the environment of torchrun, without a process group."""
    return not int(os.environ.get("RANK", "0"))


def device_of_process(device: str | torch.device | None) -> torch.device:
    """Return the device of this process: one of its own if torchrun started several processes on GPUs.

    Args:
        device: A device, or "auto" or None for the first available of CUDA, XPU, MPS and CPU.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return resolve_device(device or "auto")
    is_open = device in (None, "auto")
    if torch.cuda.is_available() and (is_open or str(device).startswith("cuda")):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return resolve_device("cpu" if is_open or device is None else device)


@contextmanager
def open_process_group(device: str | torch.device | None, single_process: bool = False) -> Iterator[ProcessGroup]:
    """Open the process group that torchrun started, or a group of one.

    Args:
        device: Device of this process, or "auto". None: a GPU if there is one.
        single_process: Open a group of one, for processes that do the same work together.

    Yields:
        The process group.
    """
    if single_process:
        yield ProcessGroup(0, 1, torch.device(device or "cpu"))
        return
    size = int(os.environ.get("WORLD_SIZE", "1"))
    started = size > 1 and not dist.is_initialized()
    target_device = device_of_process(device) if started else resolve_device(device or "auto")
    if started:
        if target_device.type == "cuda":
            torch.cuda.set_device(target_device)
        dist.init_process_group("nccl" if target_device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        initialized = dist.is_initialized()
        yield ProcessGroup(
            dist.get_rank() if initialized else 0, dist.get_world_size() if initialized else 1, target_device
        )
    finally:
        if started:
            dist.destroy_process_group()


class ProcessGroupOps:
    """The collectives of the processes that share the heads of a model."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: dict) -> "ProcessGroupOps":
        return self  # a copied model uses the same processes

    def __repr__(self) -> str:
        return f"ProcessGroupOps(rank={self.rank}, size={self.size})"

    def copy_to_group(self, x: Tensor) -> Tensor:
        """Mark a replicated tensor of which each process uses a part: its gradients are summed."""
        return _Copy.apply(x, self)  # pyright: ignore[reportReturnType]

    def sum(self, x: Tensor) -> Tensor:
        """Sum the parts of all processes."""
        return _Sum.apply(x, self)  # pyright: ignore[reportReturnType]

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Concatenate the pieces of all processes along an axis, in the order of ranks; `sizes` are their lengths."""
        return _Gather.apply(x, self, dim % x.ndim, tuple(sizes))  # pyright: ignore[reportReturnType]

    def local_slice(self, x: Tensor, dim: int, indices: Sequence[Sequence[int]]) -> Tensor:
        """Select the entries of this process along an axis; `indices` are the entries of each process."""
        return _LocalSlice.apply(x, self, dim % x.ndim, tuple(map(tuple, indices)))  # pyright: ignore[reportReturnType]

    # Without gradients

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        if total.numel():
            call_collective(lambda: dist.all_reduce(total, group=self.group))
        return total

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over all processes."""
        maximum = x.detach().clone(memory_format=torch.contiguous_format)
        if maximum.numel():
            call_collective(lambda: dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group))
        return maximum

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """Return the tensors of all processes; `sizes` are their lengths along an axis."""
        max_size = max(sizes)
        x = x.detach().movedim(dim, 0)
        # All tensors are padded to one size, because some backends do not support different sizes.
        padded = x.new_zeros(max_size, *x.shape[1:])
        padded[: len(x)] = x
        gathered = [torch.empty_like(padded) for _ in sizes]
        if padded.numel():
            call_collective(lambda: dist.all_gather(gathered, padded, group=self.group))
        return [piece[:size].movedim(0, dim) for piece, size in zip(gathered, sizes, strict=True)]

    def barrier(self) -> None:
        """Wait until all processes have arrived."""
        call_collective(lambda: dist.barrier(group=self.group))


def call_collective(collective: Callable[[], X]) -> X:
    """Run a collective operation. Raise a HeadwiseError if another process does not respond."""
    try:
        return collective()
    except (RuntimeError, ValueError) as error:
        if isinstance(error, HeadwiseError):
            raise
        raise _lost_peer_error(error) from None


@contextmanager
def explain_peer_errors() -> Iterator[None]:
    """Raise the HeadwiseError of `call_collective` if a collective that torch itself calls inside fails."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise _lost_peer_error(error) from None
        raise


def _lost_peer_error(error: Exception) -> HeadwiseError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return HeadwiseError(
        f"processes: another process has ended or does not respond ({first_line}). Check its output, then start all "
        "processes again."
    )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: ProcessGroupOps) -> Tensor:
        ctx.collectives = collectives
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.collectives.all_reduce_sum(grad_output), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: ProcessGroupOps) -> Tensor:
        return collectives.all_reduce_sum(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_output, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, collectives: ProcessGroupOps, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.dim, ctx.start, ctx.length = dim, sum(sizes[: collectives.rank]), sizes[collectives.rank]
        return torch.cat(collectives.all_gather(x, dim, sizes), dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_output.narrow(ctx.dim, ctx.start, ctx.length), None, None, None


class _LocalSlice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, collectives: ProcessGroupOps, dim: int, indices: tuple[tuple[int, ...], ...]
    ) -> Tensor:
        ctx.collectives, ctx.dim, ctx.indices, ctx.length = collectives, dim, indices, x.shape[dim]
        return x.index_select(dim, torch.tensor(indices[collectives.rank], dtype=torch.long, device=x.device))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        shape = list(grad_output.shape)
        shape[ctx.dim] = ctx.length
        full = grad_output.new_zeros(shape)
        for piece, piece_indices in zip(
            ctx.collectives.all_gather(grad_output, ctx.dim, [len(process_indices) for process_indices in ctx.indices]),
            ctx.indices,
            strict=True,
        ):
            full.index_copy_(ctx.dim, torch.tensor(piece_indices, dtype=torch.long, device=grad_output.device), piece)
        return full, None, None, None
