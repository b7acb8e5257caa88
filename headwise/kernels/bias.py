"""What is added to scores before the softmax, as a type: a tensor that is given, ALiBi, T5's buckets, or one of your own.

A bias says its numbers block by block, so that no (T, S) plane has to be held, and which tensors in it may be learned.
Kernels, recordings and layers ask it, and know no kind by name.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.kernels.masks import cut_block
from headwise.kernels.positions import alibi_slopes


@dataclass(frozen=True, eq=False)
class Bias(ABC):
    """A number for each head, query and key. A new kind is a frozen dataclass with one method, `block`.

    Its fields that are tensors may be learned, and begin with the axis of heads: (H, …).

    >>> @dataclass(frozen=True, eq=False)
    ... class Kerple(Bias):
    ...     slopes: Tensor  # (H,)
    ...
    ...     def block(self, rows, cols, T, S):
    ...         return -self.slopes[:, None, None] * distances(rows, cols, T, S).abs().log1p()
    >>> Kerple(torch.ones(2)).block(range(1), range(3), 1, 3).shape
    torch.Size([2, 1, 3])
    """

    hides: ClassVar[bool] = False  # whether it may say −inf, and so leave a row nothing to see
    learned_as: ClassVar[str] = "the bias is learned"  # said where that decides which kernel runs
    begins_at: ClassVar[float] = 0.0  # what a layer learns of it starts here

    @abstractmethod
    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        """The numbers of these queries and keys, broadcastable to (B, H, R, C); the last query stands at the last key."""

    @classmethod
    def of_layer(cls, learned: Tensor, heads: int, kept: Sequence[int]) -> Self:
        """As a layer has it: `learned` is (H, n), `kept` its heads by their numbers among the `heads` it was born with."""
        raise HeadwiseError(f"{cls.__name__} is no bias of layers; give it to a call, bias=….")

    def tensors(self) -> list[Tensor]:
        """The tensors in it."""
        return [getattr(self, name) for name in self._names()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """The same with other tensors, in that order."""
        return replace(self, **dict(zip(self._names(), tensors, strict=True)))

    def planes(self) -> tuple[int, int]:
        """How many texts and heads have numbers of their own; 1 where all share them."""
        heads = {len(tensor) for tensor in self.tensors()} or {1}
        if len(heads) > 1:
            raise HeadwiseError(
                f"the tensors of {type(self).__name__} are for {sorted(heads)} heads; one count is needed."
            )
        return 1, heads.pop()

    def for_heads(self, heads: slice | list[int]) -> Self:
        """The same for some of the heads."""
        return self.with_tensors([tensor[heads] for tensor in self.tensors()])

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """Refuse a call it does not fit."""
        batch, heads = self.planes()
        if batch not in (1, B) or (heads != H and self.tensors()):
            raise HeadwiseError(f"the bias is for {heads} heads, the call has {H}; give it a row for each head.")

    def learned(self) -> bool:
        """Whether gradients flow into it now."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors())

    def kept(self) -> Self:
        """The same for later: without gradients, and copied, since what is learned is written over."""
        return self.with_tensors([tensor.detach().clone() for tensor in self.tensors()])

    def _names(self) -> list[str]:
        return [field.name for field in fields(self) if isinstance(getattr(self, field.name), Tensor)]


@dataclass(frozen=True, eq=False)
class Given(Bias):
    """A tensor, (1 or B, 1 or H, 1 or T, 1 or S)."""

    tensor: Tensor
    hides = True

    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        return cut_block(self.tensor, rows, cols)

    def planes(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def for_heads(self, heads: slice | list[int]) -> "Given":
        return self if self.tensor.shape[1] == 1 else Given(self.tensor[:, heads])

    def check(self, B: int, H: int, T: int, S: int) -> None:
        shape, want = tuple(self.tensor.shape), (B, H, T, S)
        if len(shape) != 4 or any(have not in (1, asked) for have, asked in zip(shape, want, strict=True)):
            raise HeadwiseError(f"bias is {shape} but must broadcast to {want}, with four axes.")

    def kept(self) -> "Given":
        """Copied only where it is a parameter itself: what a layer computed is large, and nobody writes over it."""
        own = self.tensor.is_leaf and self.tensor.requires_grad
        return Given(self.tensor.detach().clone() if own else self.tensor.detach())


@dataclass(frozen=True, eq=False)
class Alibi(Bias):
    """−slope·distance (https://arxiv.org/abs/2108.12409). `slopes` is (H,)."""

    slopes: Tensor
    learned_as = "the ALiBi slopes are learned"

    @classmethod
    def of_layer(cls, learned: Tensor, heads: int, kept: Sequence[int]) -> "Alibi":
        """Each head's slope by its original number, so that cutting a neighbour changes nothing."""
        return Alibi((alibi_slopes(heads)[list(kept)] if kept else torch.zeros(0)).to(learned))

    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        return -self.slopes[None, :, None, None] * distances(rows, cols, T, S, self.slopes.device).abs()


@dataclass(frozen=True, eq=False)
class Buckets(Bias):
    """T5's (https://arxiv.org/abs/1910.10683): one learned number for each head and bucket of distances, (H, buckets).

    Near distances have a bucket each, farther ones share them on a log scale up to `farthest`; with `both_ways` half of the
    buckets are for keys after the query, else those share the bucket of distance 0.

    >>> table = torch.arange(8.0)[None]
    >>> Buckets(table, farthest=16, both_ways=False).block(range(6), range(6), 6, 6)[0, 0, 5].tolist()
    [4.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    """

    table: Tensor
    farthest: int = 128
    both_ways: bool = True
    learned_as = "the table of buckets is learned"

    @classmethod
    def of_layer(cls, learned: Tensor, heads: int, kept: Sequence[int]) -> "Buckets":
        return Buckets(learned)

    def __post_init__(self) -> None:
        shape, least = tuple(self.table.shape), 4 if self.both_ways else 2
        if len(shape) != 2 or shape[1] < least:
            raise HeadwiseError(f"a table of buckets is (heads, buckets) with at least {least} buckets, got {shape}.")
        exact = shape[1] // least
        if self.farthest <= exact:
            raise HeadwiseError(
                f"distances to {exact - 1} have a bucket each here, so farthest={self.farthest} is too near."
            )

    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        back = distances(rows, cols, T, S, self.table.device)  # (R, C)
        return self.table[:, self._bucket(back)][None]  # (1, H, R, C)

    def _bucket(self, back: Tensor) -> Tensor:
        count, first = self.table.shape[1], torch.zeros_like(back)
        if self.both_ways:
            count //= 2
            first, back = torch.where(back < 0, count, 0), back.abs()
        back = back.clamp(min=0)
        exact = count // 2
        far = torch.log(back.clamp(min=1).float() / exact) / math.log(self.farthest / exact) * (count - exact)
        return first + torch.where(back < exact, back, (exact + far.long()).clamp(max=count - 1))


POSITION_BIASES: dict[str, type[Bias]] = {
    "alibi": Alibi,
    "buckets": Buckets,
}  # by the field of a spec that asks for one


def distances(rows: range, cols: range, T: int, S: int, device: torch.device | None = None) -> Tensor:
    """How far each key lies before each query, (R, C); negative where it comes after.

    >>> distances(range(2), range(3), 2, 3)
    tensor([[ 1,  0, -1],
            [ 2,  1,  0]])
    """
    queries = torch.arange(rows.start + S - T, rows.stop + S - T, device=device)
    return queries[:, None] - torch.arange(cols.start, cols.stop, device=device)
