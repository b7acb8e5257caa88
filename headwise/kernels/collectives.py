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
PATIENCE = timedelta(minutes=5)  # how long a process waits for another before it gives up


class Together:
    """Some processes, and which of them this one is."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: dict) -> "Together":
        return self  # a copied model is computed by the same processes

    def __repr__(self) -> str:
        return f"Together(rank={self.rank}, size={self.size})"

    def copy(self, x: Tensor) -> Tensor:
        """The same everywhere, about to be read by parts."""
        return _Copy.apply(x, self)  # pyright: ignore[reportReturnType]

    def sum(self, x: Tensor) -> Tensor:
        """Parts, added up."""
        return _Sum.apply(x, self)  # pyright: ignore[reportReturnType]

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Pieces behind each other along an axis, in the order of processes, whose pieces have these sizes."""
        return _Gather.apply(x, self, dim % x.ndim, tuple(sizes))  # pyright: ignore[reportReturnType]

    def own(self, x: Tensor, dim: int, places: Sequence[Sequence[int]]) -> Tensor:
        """Of the whole what belongs to this process: for each process the places of its entries along an axis."""
        return _Own.apply(x, self, dim % x.ndim, tuple(map(tuple, places)))  # pyright: ignore[reportReturnType]

    # Without gradients.

    def added(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        made = x.detach().clone(memory_format=torch.contiguous_format)
        if made.numel():
            reached(lambda: dist.all_reduce(made, group=self.group))
        return made

    def largest(self, x: Tensor) -> Tensor:
        """The largest of each number over all processes."""
        made = x.detach().clone(memory_format=torch.contiguous_format)
        if made.numel():
            reached(lambda: dist.all_reduce(made, dist.ReduceOp.MAX, group=self.group))
        return made

    def pieces(self, x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
        """What every process has of a tensor; along an axis they may differ in size."""
        longest = max(sizes)
        x = x.detach().movedim(dim, 0)
        mine = x.new_zeros(
            longest, *x.shape[1:]
        )  # all are sent at one size: uneven ones are not taken by every backend
        mine[: len(x)] = x
        there = [torch.empty_like(mine) for _ in sizes]
        if mine.numel():
            reached(lambda: dist.all_gather(there, mine, group=self.group))
        return [piece[:size].movedim(0, dim) for piece, size in zip(there, sizes, strict=True)]

    def wait(self) -> None:
        """Until all are here."""
        reached(lambda: dist.barrier(group=self.group))


def reached(ask: Callable[[], X]) -> X:
    """What asks all processes; one that does not answer is told as what it is."""
    try:
        return ask()
    except (RuntimeError, ValueError) as error:
        if isinstance(error, HeadwiseError):
            raise
        raise _gone(error) from None


@contextmanager
def explaining_lost_peers() -> Iterator[None]:
    """Around work in which torch itself asks other processes: where that fails it is told in the same words."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise _gone(error) from None
        raise


def _gone(error: Exception) -> HeadwiseError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return HeadwiseError(
        f"another process of the team is gone or does not answer ({first}); look at what it said, and start all again."
    )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Together) -> Tensor:
        ctx.team = team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.team.added(slope), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Together) -> Tensor:
        return team.added(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return slope, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Together, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.dim, ctx.start, ctx.length = dim, sum(sizes[: team.rank]), sizes[team.rank]
        return torch.cat(team.pieces(x, dim, sizes), dim)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return slope.narrow(ctx.dim, ctx.start, ctx.length), None, None, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Together, dim: int, places: tuple[tuple[int, ...], ...]) -> Tensor:
        ctx.team, ctx.dim, ctx.places, ctx.length = team, dim, places, x.shape[dim]
        return x.index_select(dim, torch.tensor(places[team.rank], dtype=torch.long, device=x.device))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        shape = list(slope.shape)
        shape[ctx.dim] = ctx.length
        whole = slope.new_zeros(shape)
        for piece, there in zip(ctx.team.pieces(slope, ctx.dim, [len(p) for p in ctx.places]), ctx.places, strict=True):
            whole.index_copy_(ctx.dim, torch.tensor(there, dtype=torch.long, device=slope.device), piece)
        return whole, None, None, None
