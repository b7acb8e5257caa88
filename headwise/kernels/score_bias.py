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
from headwise.kernels.masks import slice_block
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
    ...         return -self.slopes[:, None, None] * query_minus_key_distances(rows, cols, T, S).abs().log1p()
    >>> Kerple(torch.ones(2)).block(range(1), range(3), 1, 3).shape
    torch.Size([2, 1, 3])
    """

    may_hide_keys: ClassVar[bool] = False  # whether it may say −inf, and so leave a row nothing to see
    learned_reason: ClassVar[str] = "the bias is learned"  # said where that decides which kernel runs
    initial_value: ClassVar[float] = 0.0  # what a layer learns of it starts here

    @abstractmethod
    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        """The numbers of these queries and keys, broadcastable to (B, H, R, C); the last query stands at the last key."""

    @classmethod
    def from_layer(cls, parameters: Tensor, heads: int, head_ids: Sequence[int]) -> Self:
        """As a layer has it: `parameters` (H, n), `head_ids` its heads by number among the `heads` it was born with."""
        raise HeadwiseError(f"{cls.__name__} is no bias of layers; give it to a call, bias=….")

    def tensors(self) -> list[Tensor]:
        """The tensors in it."""
        return [getattr(self, name) for name in self._tensor_names()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """The same with other tensors, in that order."""
        return replace(self, **dict(zip(self._tensor_names(), tensors, strict=True)))

    def leading_shape(self) -> tuple[int, int]:
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
        batch, heads = self.leading_shape()
        if batch not in (1, B) or (heads != H and self.tensors()):
            raise HeadwiseError(f"the bias is for {heads} heads, the call has {H}; give it a row for each head.")

    def needs_grad(self) -> bool:
        """Whether gradients flow into it now."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors())

    def detached_copy(self) -> Self:
        """The same for later: without gradients, and copied, since what is learned is written over."""
        return self.with_tensors([tensor.detach().clone() for tensor in self.tensors()])

    def _tensor_names(self) -> list[str]:
        return [field.name for field in fields(self) if isinstance(getattr(self, field.name), Tensor)]


@dataclass(frozen=True, eq=False)
class DenseBias(Bias):
    """A tensor, (1 or B, 1 or H, 1 or T, 1 or S)."""

    tensor: Tensor
    may_hide_keys = True

    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        return slice_block(self.tensor, rows, cols)

    def leading_shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def for_heads(self, heads: slice | list[int]) -> "DenseBias":
        return self if self.tensor.shape[1] == 1 else DenseBias(self.tensor[:, heads])

    def check(self, B: int, H: int, T: int, S: int) -> None:
        shape, expected = tuple(self.tensor.shape), (B, H, T, S)
        if len(shape) != 4 or any(
            size not in (1, expected_size) for size, expected_size in zip(shape, expected, strict=True)
        ):
            raise HeadwiseError(f"bias is {shape} but must broadcast to {expected}, with four axes.")

    def detached_copy(self) -> "DenseBias":
        """Copied only where it is a parameter itself: what a layer computed is large, and nobody writes over it."""
        is_parameter = self.tensor.is_leaf and self.tensor.requires_grad
        return DenseBias(self.tensor.detach().clone() if is_parameter else self.tensor.detach())


@dataclass(frozen=True, eq=False)
class AlibiBias(Bias):
    """−slope·distance (https://arxiv.org/abs/2108.12409). `slopes` is (H,)."""

    slopes: Tensor
    learned_reason = "the ALiBi slopes are learned"

    @classmethod
    def from_layer(cls, parameters: Tensor, heads: int, head_ids: Sequence[int]) -> "AlibiBias":
        """Each head's slope by its original number, so that cutting a neighbour changes nothing."""
        return AlibiBias((alibi_slopes(heads)[list(head_ids)] if head_ids else torch.zeros(0)).to(parameters))

    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        return -self.slopes[None, :, None, None] * query_minus_key_distances(rows, cols, T, S, self.slopes.device).abs()


@dataclass(frozen=True, eq=False)
class T5RelativeBias(Bias):
    """T5's (https://arxiv.org/abs/1910.10683): one learned number for each head and bucket of distances, (H, buckets).

    Near distances have a bucket each, farther ones share them on a log scale up to `max_distance`; with `bidirectional`
    half of the buckets are for keys after the query, else those share the bucket of distance 0.

    >>> table = torch.arange(8.0)[None]
    >>> T5RelativeBias(table, max_distance=16, bidirectional=False).block(range(6), range(6), 6, 6)[0, 0, 5].tolist()
    [4.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    """

    table: Tensor
    max_distance: int = 128
    bidirectional: bool = True
    learned_reason = "the table of buckets is learned"

    @classmethod
    def from_layer(cls, parameters: Tensor, heads: int, head_ids: Sequence[int]) -> "T5RelativeBias":
        return T5RelativeBias(parameters)

    def __post_init__(self) -> None:
        shape, min_buckets = tuple(self.table.shape), 4 if self.bidirectional else 2
        if len(shape) != 2 or shape[1] < min_buckets:
            raise HeadwiseError(
                f"a table of buckets is (heads, buckets) with at least {min_buckets} buckets, got {shape}."
            )
        exact = shape[1] // min_buckets
        if self.max_distance <= exact:
            raise HeadwiseError(
                f"distances to {exact - 1} have a bucket each here, so max_distance={self.max_distance} is too near."
            )

    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        distance = query_minus_key_distances(rows, cols, T, S, self.table.device)  # (R, C)
        return self.table[:, self._bucket(distance)][None]  # (1, H, R, C)

    def _bucket(self, distance: Tensor) -> Tensor:
        count, first_bucket = self.table.shape[1], torch.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            first_bucket, distance = torch.where(distance < 0, count, 0), distance.abs()
        distance = distance.clamp(min=0)
        exact = count // 2
        log_bucket = (
            torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact) * (count - exact)
        )
        return first_bucket + torch.where(distance < exact, distance, (exact + log_bucket.long()).clamp(max=count - 1))


# by the field of a spec that asks for one
POSITION_BIASES: dict[str, type[Bias]] = {"alibi": AlibiBias, "t5_buckets": T5RelativeBias}


def query_minus_key_distances(rows: range, cols: range, T: int, S: int, device: torch.device | None = None) -> Tensor:
    """How far each key lies before each query, (R, C); negative where it comes after.

    >>> query_minus_key_distances(range(2), range(3), 2, 3)
    tensor([[ 1,  0, -1],
            [ 2,  1,  0]])
    """
    queries = torch.arange(rows.start + S - T, rows.stop + S - T, device=device)
    return queries[:, None] - torch.arange(cols.start, cols.stop, device=device)
