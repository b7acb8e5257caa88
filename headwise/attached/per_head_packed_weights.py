"""Projections of a transformers model whose weights are stored packed, at a number of bits per head.

A module keeps its identity, hooks and forward method. Its class becomes a subclass in which `weight` is a property that
dequantizes. The module then multiplies by it: the reference, dequantize and multiply.

    Linear.weight (out, in)   →   PerHeadQuantizedMatrix: parts (matrices, rows, inputs) with a QuantizedWeight each, others
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from headwise.heads.quantized_layers import QuantizedWeight
from headwise.kernels.quantization import fake_quantize
from headwise.spec.weight_bits import FULL_PRECISION

PACKED = "headwise_packed"  # attribute of a module that stores its PerHeadQuantizedMatrix


class PerHeadQuantizedMatrix(nn.Module):
    """A weight (out, in) whose rows, or columns in an output projection, are quantized per head.

    Args:
        size: Shape (out, in).
        columns_by_head: True for W_O: matrices are (out, inputs of a head) and lie side by side.
        transposed: True if the module stores its weight as (in, out).
        activation_bits: Bits of the activations that the weight is multiplied by.
    """

    other_rows: Tensor

    def __init__(
        self,
        size: tuple[int, int],
        *,
        columns_by_head: bool = False,
        transposed: bool = False,
        activation_bits: int = FULL_PRECISION,
    ) -> None:
        super().__init__()
        self.size, self.columns_by_head, self.transposed = size, columns_by_head, transposed
        self.activation_bits = activation_bits
        self.parts = nn.ModuleDict()
        self.rows: dict[str, list[int]] = {}  # rows of the weight that each part covers
        self.register_buffer("other_rows", torch.empty(0, size[1]))

    @torch.no_grad()
    def quantize_rows_or_columns(
        self, name: str, weight: Tensor, bits: Sequence[int], group_size: int, rows: list[int] | None = None
    ) -> None:
        """Quantize matrices (matrices, rows, inputs), each with its own bits.

        Args:
            name: Name of the part.
            weight: Values of the matrices.
            bits: Bits of each matrix.
            group_size: Number of weights along the inputs that share a scale.
            rows: Rows of the weight that the part covers. None means all.
        """
        with torch.device("meta"):
            part = QuantizedWeight(bits, weight.shape[1], weight.shape[2], group_size, self.activation_bits)
        part.inputs_are_split = self.columns_by_head
        for buffer_name, value in part.quantize_to_buffers(weight.detach()).items():
            part._buffers[buffer_name] = value
        part.dtype = weight.dtype
        self.parts[name] = part
        if rows is not None:
            self.rows[name] = rows

    def select_rows(self, indices: Sequence[int]) -> None:
        """Keep these rows of the weight, in this order. Rows of a quantized matrix are selected or repeated together."""
        part_rows = {name: int(part.rows) for name, part in self.parts.items()}  # pyright: ignore[reportArgumentType]
        owner = {
            row: (name, position // part_rows[name])
            for name in part_rows
            for position, row in enumerate(self.rows.get(name, range(self.size[0])))
        }
        other_positions = {row: position for position, row in enumerate(self._other_indices())}
        matrices: dict[str, list[int]] = {name: [] for name in self.parts}
        rows: dict[str, list[int]] = {name: [] for name in self.rows}
        others: list[int] = []
        start = 0
        while start < len(indices):
            if indices[start] not in owner:
                others.append(other_positions[indices[start]])
                start += 1
                continue
            name, matrix = owner[indices[start]]
            end = start + part_rows[name]
            matrices[name].append(matrix)
            if name in rows:
                rows[name] += range(start, end)
            start = end
        for name, selected in matrices.items():
            self.parts[name] = _select_matrices(self.parts[name], selected)  # pyright: ignore[reportArgumentType]
        self.other_rows = self.other_rows[others]
        self.rows, self.size = rows, (len(indices), self.size[1])

    def keep_other_rows(self, weight: Tensor) -> None:
        """Store the rows of a weight (out, in) that no part covers unchanged."""
        self.other_rows = weight.detach()[self._other_indices()].clone() if self.rows else weight.detach()[:0].clone()

    def assemble(self) -> Tensor:
        """Return the dequantized weight in the layout of the module: (out, in), or (in, out) if transposed."""
        weights = {name: part.dequantize() for name, part in self.parts.items()}  # pyright: ignore[reportCallIssue]
        if self.columns_by_head:
            (matrices,) = weights.values()  # (H, D, e)
            weight = matrices.permute(1, 0, 2).flatten(1)
        elif not self.rows:
            (matrices,) = weights.values()
            weight = matrices.flatten(0, 1)
        else:
            weight = self.other_rows.new_empty(self.size)
            weight[self._other_indices()] = self.other_rows
            for name, matrices in weights.items():
                weight[self.rows[name]] = matrices.flatten(0, 1).to(weight)
        return weight.mT if self.transposed else weight

    def _other_indices(self) -> list[int]:
        if not self.rows:
            return []
        covered = {row for rows in self.rows.values() for row in rows}
        return [row for row in range(self.size[0]) if row not in covered]

    def quantize_input(self, x: Tensor) -> Tensor:
        """Quantize and dequantize an input row by row, in W_O per head, if `activation_bits` is below 32."""
        if self.activation_bits == FULL_PRECISION:
            return x
        if not self.columns_by_head:
            return fake_quantize(x, self.activation_bits, x.shape[-1])
        (part,) = self.parts.values()
        by_head = x.unflatten(-1, (-1, part.inputs))  # pyright: ignore[reportArgumentType]
        return fake_quantize(by_head, self.activation_bits, by_head.shape[-1]).flatten(-2)


def _select_matrices(part: QuantizedWeight, matrices: list[int]) -> QuantizedWeight:
    """Return a quantized weight with some matrices of another one, in this order."""
    with torch.device("meta"):
        bits = [part.bits[matrix] for matrix in matrices]
        selected = QuantizedWeight(bits, part.rows, part.inputs, part.group_size, part.activation_bits)
    selected.inputs_are_split, selected.dtype = part.inputs_are_split, part.dtype
    for name, value in part.select_matrix_buffers(matrices).items():
        selected._buffers[name] = value
    return selected


class DequantizeOnAccessMixin:
    """Projection or embedding whose weight is dequantized on access."""

    @property
    def weight(self) -> Tensor:
        """Dequantized weight, a copy."""
        return packed_weight_of(self).assemble()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output with the dequantized weight."""
        packed = packed_weight_of(self)
        if isinstance(self, nn.Embedding):
            if type(self).__mro__[2] is nn.Embedding and "weight" in packed.parts:  # only the rows of these tokens
                return packed.parts["weight"].dequantize_rows(x)  # pyright: ignore[reportCallIssue]
            return super().forward(x, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return super().forward(packed.quantize_input(x), *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_packed, (type(self).__mro__[2],), self.__dict__


@cache
def _dequantize_on_access_subclass(base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a module class whose weight is packed. It has the name of the module class."""
    return type(base.__name__, (DequantizeOnAccessMixin, base), {"__module__": base.__module__})


def _new_packed(base: type[nn.Module]) -> nn.Module:
    packed_class = _dequantize_on_access_subclass(base)
    return packed_class.__new__(packed_class)


def packed_weight_of(module: Any) -> PerHeadQuantizedMatrix:
    """Return the packed weight of a module. A tied output projection refers to that of the embedding."""
    shared = module.__dict__.get(PACKED)
    return module._modules[PACKED] if shared is None else shared[0]


def is_packed(module: nn.Module) -> bool:
    """Return whether a module has a packed weight."""
    return isinstance(module, DequantizeOnAccessMixin)


def pack_weight(module: nn.Module, packed: PerHeadQuantizedMatrix, *, is_owner: bool = True) -> Callable[[], None]:
    """Replace the weight of a module by a packed one. Returns a function that restores the module.

    Args:
        module: Linear, Conv1D or Embedding.
        packed: The packed weight.
        is_owner: False if another module saves the packed weight, as for tied weights.
    """
    weight, base = module._parameters.pop("weight"), type(module)
    if is_owner:
        module.add_module(PACKED, packed)
    else:
        module.__dict__[PACKED] = (packed,)  # in a tuple, so that it does not become a submodule
    module.__class__ = _dequantize_on_access_subclass(base)

    def restore() -> None:
        _remove_packed_weight(module, base)
        module.register_parameter("weight", weight)

    return restore


def unpack_weight_in_place(module: nn.Module) -> None:
    """Replace the packed weight of a module by its dequantized values."""
    value = module.weight.detach().contiguous().clone()  # pyright: ignore[reportCallIssue]
    _remove_packed_weight(module, type(module).__mro__[2])
    module.register_parameter("weight", nn.Parameter(value))


def _remove_packed_weight(module: nn.Module, base: type[nn.Module]) -> None:
    module._modules.pop(PACKED, None)
    module.__dict__.pop(PACKED, None)
    module.__class__ = base


def packed_dtype_and_device(module: nn.Module) -> tuple[torch.dtype, torch.device] | None:
    """Return dtype and device of the first packed weight inside a module, or None."""
    for part in module.modules():
        if isinstance(part, PerHeadQuantizedMatrix):
            return part.other_rows.dtype, part.other_rows.device
    return None
