"""Processes that compute one thing together: sums and pieces of tensors, with gradients.

Every process computes the same loss and goes back from it. A tensor is either the same in all processes, and then so is its
gradient, or each has a part of it. Four functions lead from one kind to the other:

    copy     the same everywhere → read by parts          backward: the sum of what the parts gave
    sum      parts that add up → the same everywhere      backward: as it is
    gather   pieces → the whole, everywhere               backward: the own piece
    own      the whole, everywhere → the own piece        backward: all pieces, put together

All processes must call them in the same order. A peer that is gone is an error, told as such.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.errors import HeadwiseError

X = TypeVar("X")
COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # how long a process waits for another before it gives up


class ProcessGroupOps:
    """Some processes, and which of them this one is."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: dict) -> "ProcessGroupOps":
        return self  # a copied model is computed by the same processes

    def __repr__(self) -> str:
        return f"ProcessGroupOps(rank={self.rank}, size={self.size})"

    def copy_to_group(self, x: Tensor) -> Tensor:
        """The same everywhere, about to be read by parts."""
        return _Copy.apply(x, self)  # pyright: ignore[reportReturnType]

    def sum(self, x: Tensor) -> Tensor:
        """Parts, added up."""
        return _Sum.apply(x, self)  # pyright: ignore[reportReturnType]

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Pieces behind each other along an axis, in the order of processes, whose pieces have these sizes."""
        return _Gather.apply(x, self, dim % x.ndim, tuple(sizes))  # pyright: ignore[reportReturnType]

    def local_slice(self, x: Tensor, dim: int, indices: Sequence[Sequence[int]]) -> Tensor:
        """Of the whole what belongs to this process: for each process the places of its entries along an axis."""
        return _LocalSlice.apply(x, self, dim % x.ndim, tuple(map(tuple, indices)))  # pyright: ignore[reportReturnType]

    # Without gradients.

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        if total.numel():
            call_collective(lambda: dist.all_reduce(total, group=self.group))
        return total

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest of each number over all processes."""
        maximum = x.detach().clone(memory_format=torch.contiguous_format)
        if maximum.numel():
            call_collective(lambda: dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group))
        return maximum

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """What every process has of a tensor; along an axis they may differ in size."""
        max_size = max(sizes)
        x = x.detach().movedim(dim, 0)
        # all are sent at one size: uneven ones are not taken by every backend
        padded = x.new_zeros(max_size, *x.shape[1:])
        padded[: len(x)] = x
        gathered = [torch.empty_like(padded) for _ in sizes]
        if padded.numel():
            call_collective(lambda: dist.all_gather(gathered, padded, group=self.group))
        return [piece[:size].movedim(0, dim) for piece, size in zip(gathered, sizes, strict=True)]

    def barrier(self) -> None:
        """Until all are here."""
        call_collective(lambda: dist.barrier(group=self.group))


def call_collective(collective: Callable[[], X]) -> X:
    """What asks all processes; one that does not answer is told as what it is."""
    try:
        return collective()
    except (RuntimeError, ValueError) as error:
        if isinstance(error, HeadwiseError):
            raise
        raise _lost_peer_error(error) from None


@contextmanager
def explain_peer_errors() -> Iterator[None]:
    """Around work in which torch itself asks other processes: where that fails it is told in the same words."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise _lost_peer_error(error) from None
        raise


def _lost_peer_error(error: Exception) -> HeadwiseError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return HeadwiseError(
        f"another process of the team is gone or does not answer ({first_line}); look at what it said, and start all again."
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
