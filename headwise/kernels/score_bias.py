"""Biases that are added to attention scores before the softmax: a dense tensor, ALiBi, T5 buckets, or a custom class.

A bias is computed block by block, so that no (T, S) tensor is needed, and lists its tensors that can be learned. Kernels,
recordings and layers use only the interface of `Bias`, so a new subclass works everywhere.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from headwise.errors import ArgumentError, HeadwiseError
from headwise.kernels.masks import slice_block
from headwise.kernels.positions import alibi_slopes
from headwise.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Bias(ABC):
    """Base class of biases: a number for each head, query and key. A subclass is a frozen dataclass with a method `block`.

    Fields that are tensors can be learned. Their first axis is the head axis: (H, …).

    Attributes:
        may_hide_keys: True if the bias can be −inf, so that a row may have no visible key.
        learned_reason: Text for `KernelChoice.reason` if a learned bias decides the kernel.
        initial_value: Initial value of the parameters of a layer with this bias.

    >>> @dataclass(frozen=True, eq=False)
    ... class Kerple(Bias):
    ...     slopes: Tensor  # (H,)
    ...
    ...     def block(self, rows, cols, T, S):
    ...         return -self.slopes[:, None, None] * query_minus_key_distances(rows, cols, T, S).abs().log1p()
    >>> Kerple(torch.ones(2)).block(range(1), range(3), 1, 3).shape
    torch.Size([2, 1, 3])
    """

    may_hide_keys: ClassVar[bool] = False
    learned_reason: ClassVar[str] = "the bias is learned"
    initial_value: ClassVar[float] = 0.0

    @abstractmethod
    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        """Return the bias of some queries and keys, broadcastable to (B, H, R, C). The last query is at the last key."""

    @classmethod
    def from_layer(cls, parameters: Tensor, spec: AttentionSpec) -> Self:
        """Create the bias of a layer from its parameters, (H, n), and its configuration."""
        raise HeadwiseError(f"{cls.__name__}: cannot be the position bias of a layer. Pass it to a call as bias=….")

    def tensors(self) -> list[Tensor]:
        """Return the fields that are tensors."""
        return [getattr(self, name) for name in self._tensor_names()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """Return a copy with other tensors, in the order of `tensors()`."""
        return replace(self, **dict(zip(self._tensor_names(), tensors, strict=True)))

    def leading_shape(self) -> tuple[int, int]:
        """Return the batch and head sizes of the bias, 1 if all examples or heads share it."""
        heads = {len(tensor) for tensor in self.tensors()} or {1}
        if len(heads) > 1:
            raise ArgumentError(
                f"{type(self).__name__}: its tensors must have the same number of heads. Got {sorted(heads)}."
            )
        return 1, heads.pop()

    def for_heads(self, heads: slice | list[int]) -> Self:
        """Return the bias of some heads."""
        return self.with_tensors([tensor[heads] for tensor in self.tensors()])

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """Raise if the bias does not fit a call with these sizes."""
        batch, heads = self.leading_shape()
        if batch not in (1, B) or (heads != H and self.tensors()):
            raise ArgumentError(f"bias: needs one row per head. Got {heads} rows for {H} heads.")

    def needs_grad(self) -> bool:
        """Return True if gradients of the bias are needed now."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors())

    def detached_copy(self) -> Self:
        """Return a copy without gradients, which later updates of the parameters do not change."""
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
            raise ArgumentError(f"bias: must have four axes and broadcast to {expected}. Got shape {shape}.")

    def detached_copy(self) -> "DenseBias":
        """Copy the tensor only if it is a parameter. A computed bias is large and is not written to again."""
        is_parameter = self.tensor.is_leaf and self.tensor.requires_grad
        return DenseBias(self.tensor.detach().clone() if is_parameter else self.tensor.detach())


@dataclass(frozen=True, eq=False)
class AlibiBias(Bias):
    """ALiBi: minus the slope of the head, (H,), times the distance (https://arxiv.org/abs/2108.12409)."""

    slopes: Tensor
    learned_reason = "the ALiBi slopes are learned"

    @classmethod
    def from_layer(cls, parameters: Tensor, spec: AttentionSpec) -> "AlibiBias":
        """Create the bias with the slope of each head by its original number, so that pruning does not change it."""
        slopes = alibi_slopes(spec.heads)[list(spec.head_ids)] if spec.head_ids else torch.zeros(0)
        return AlibiBias(slopes.to(parameters))

    def block(self, rows: range, cols: range, T: int, S: int) -> Tensor:
        return -self.slopes[None, :, None, None] * query_minus_key_distances(rows, cols, T, S, self.slopes.device).abs()


@dataclass(frozen=True, eq=False)
class T5RelativeBias(Bias):
    """T5 relative bias (https://arxiv.org/abs/1910.10683): a learned number per head and bucket of distances.

    Small distances have one bucket each. Larger distances share buckets on a log scale.

    Attributes:
        table: The learned numbers, (H, buckets).
        max_distance: All distances from this one on share the last bucket.
        bidirectional: If True, half of the buckets are for keys after the query. Otherwise these keys share the bucket of
            distance 0.

    >>> table = torch.arange(8.0)[None]
    >>> T5RelativeBias(table, max_distance=16, bidirectional=False).block(range(6), range(6), 6, 6)[0, 0, 5].tolist()
    [4.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    """

    table: Tensor
    max_distance: int = 128
    bidirectional: bool = True
    learned_reason = "the T5 bias is learned"

    @classmethod
    def from_layer(cls, parameters: Tensor, spec: AttentionSpec) -> "T5RelativeBias":
        return T5RelativeBias(parameters, spec.t5_max_distance, spec.t5_bidirectional)

    def __post_init__(self) -> None:
        shape, min_buckets = tuple(self.table.shape), 4 if self.bidirectional else 2
        if len(shape) != 2 or shape[1] < min_buckets:
            raise ArgumentError(
                f"table: must have shape (heads, buckets) with at least {min_buckets} buckets. Got shape {shape}."
            )
        exact = shape[1] // min_buckets
        if self.max_distance <= exact:
            raise ArgumentError(
                f"max_distance={self.max_distance}: must be above {exact}, because distances below {exact} have one bucket "
                f"each."
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


# by the field of AttentionSpec that enables the bias
POSITION_BIASES: dict[str, type[Bias]] = {"alibi": AlibiBias, "t5_buckets": T5RelativeBias}


def query_minus_key_distances(rows: range, cols: range, T: int, S: int, device: torch.device | None = None) -> Tensor:
    """Return the position of each query minus the position of each key, (R, C). Negative for later keys.

    >>> query_minus_key_distances(range(2), range(3), 2, 3)
    tensor([[ 1,  0, -1],
            [ 2,  1,  0]])
    """
    queries = torch.arange(rows.start + S - T, rows.stop + S - T, device=device)
    return queries[:, None] - torch.arange(cols.start, cols.stop, device=device)
