"""Modules with quantized, packed weights. Dequantizing and multiplying is the reference for all faster paths.

A `QuantizedWeight` stores matrices of one shape, for example one per head: (matrices, rows, inputs). Matrices with equal
bits share buffers such as `codes4` and `scales4`; matrices that are not quantized are in `rows32`. Buffers are not
parameters: to train a model, dequantize it first.
"""

import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.kernels.int8_matmul import make_dynamic_int8_matmul, make_int8_matmul
from headwise.kernels.matmul_tuner import BoundMatmul, MatmulTuner, linear, prepacking_tuner
from headwise.kernels.prepacked_fp16 import PrepackedMatmul, make_prepacked_matmul
from headwise.kernels.quantization import dequantize, fake_quantize, quantize
from headwise.spec.weight_bits import FULL_PRECISION, GROUP_SIZE


class QuantizedWeight(nn.Module):
    """Matrices (matrices, rows, inputs), each with its own number of bits, quantized in groups along the inputs.

    Args:
        bits: Bits per weight of each matrix. 32 means not quantized.
        rows: Number of rows of each matrix.
        inputs: Number of inputs of each matrix.
        group_size: Number of weights along the inputs that share a scale.
        activation_bits: Bits of the activations that the weights are multiplied by. 32 means not quantized.
    """

    def __init__(
        self,
        bits: Sequence[int],
        rows: int,
        inputs: int,
        group_size: int = GROUP_SIZE,
        activation_bits: int = FULL_PRECISION,
    ) -> None:
        super().__init__()
        if torch.empty(0).device.type != "meta":
            raise ArgumentError(
                "weight_bits: quantized weights cannot be initialized. Build the model without weight_bits or weight_rules "
                "and use hw.quantize(model, ...)."
            )
        self.bits, self.rows, self.inputs, self.group_size = tuple(bits), rows, inputs, group_size
        self.activation_bits, self.dtype = activation_bits, torch.get_default_dtype()
        self.inputs_are_split = False  # True if matrices are concatenated along the inputs, like the heads of W_O
        for bit_width in self._bit_widths():
            matrices = len(self._matrices_at(bit_width))
            if bit_width == FULL_PRECISION:
                self.register_buffer("rows32", torch.empty(matrices, rows, inputs))
            elif bit_width == 16:
                self.register_buffer("rows16", torch.empty(matrices, rows, inputs, dtype=torch.float16))
            else:
                code_bytes, code_dtype = (
                    (inputs, torch.int8) if bit_width == 8 else (-(-inputs * bit_width // 8), torch.uint8)
                )
                scale_count = -(-inputs // max(1, min(group_size, inputs)))
                self.register_buffer(f"codes{bit_width}", torch.empty(matrices, rows, code_bytes, dtype=code_dtype))
                self.register_buffer(
                    f"scales{bit_width}", torch.empty(matrices, rows, scale_count, dtype=torch.float32)
                )

    def _bit_widths(self) -> list[int]:
        return sorted(set(self.bits))

    def _matrices_at(self, bit_width: int) -> list[int]:
        return [matrix for matrix, bits in enumerate(self.bits) if bits == bit_width]

    def quantize_to_buffers(self, weight: Tensor) -> dict[str, Tensor]:
        """Quantize a weight, (matrices, rows, inputs), and return the buffers by name."""
        buffers: dict[str, Tensor] = {}
        for bit_width in self._bit_widths():
            selected = weight[self._matrices_at(bit_width)]
            if bit_width == FULL_PRECISION:
                buffers["rows32"] = selected.clone()
            elif bit_width == 16:
                buffers["rows16"] = selected.to(torch.float16)
                if not buffers["rows16"].isfinite().all():
                    raise ArgumentError(
                        f"bits=16: the weights exceed the largest 16-bit float, 65504. Got {selected.abs().max():.3g}. "
                        f"Use 8 bits for these weights."
                    )
            else:
                quantized, scales = quantize(selected, bit_width, self.group_size)
                buffers |= {f"codes{bit_width}": quantized.contiguous(), f"scales{bit_width}": scales.contiguous()}
        return buffers

    def select_matrix_buffers(self, matrices: Sequence[int]) -> dict[str, Tensor]:
        """Return the buffers of some matrices by name. Bit widths that none of them has are omitted."""
        buffers: dict[str, Tensor] = {}
        for bit_width in self._bit_widths():
            stored = self._matrices_at(bit_width)
            positions = [stored.index(matrix) for matrix in matrices if matrix in stored]
            names = (
                (f"rows{bit_width}",)
                if bit_width in (FULL_PRECISION, 16)
                else (f"codes{bit_width}", f"scales{bit_width}")
            )
            buffers |= {name: getattr(self, name)[positions] for name in names if positions}
        return buffers

    def dequantize(self) -> Tensor:
        """Return the dequantized weight, (matrices, rows, inputs)."""
        bit_widths = self._bit_widths()
        if len(bit_widths) == 1:
            return self._dequantize_at(bit_widths[0])
        weight = torch.empty(len(self.bits), self.rows, self.inputs, dtype=self.dtype, device=self.device)
        for bit_width in bit_widths:
            weight[self._matrices_at(bit_width)] = self._dequantize_at(bit_width)
        return weight

    def _dequantize_at(self, bit_width: int) -> Tensor:
        if bit_width in (FULL_PRECISION, 16):
            return self.get_buffer(f"rows{bit_width}").to(self.dtype)
        quantized, scales = getattr(self, f"codes{bit_width}"), getattr(self, f"scales{bit_width}")
        return dequantize(quantized, scales, bit_width, self.inputs, self.dtype, self.group_size)

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        """Return dequantized rows of the only matrix: (…) → (…, inputs)."""
        (bit_width,) = self.bits
        if bit_width == 16:
            return F.embedding(rows, self.get_buffer("rows16")[0]).to(self.dtype)
        quantized, scales = getattr(self, f"codes{bit_width}")[0], getattr(self, f"scales{bit_width}")[0]
        # F.embedding raises for rows that are out of range
        quantized, scales = (F.embedding(rows, quantized), F.embedding(rows, scales))
        return dequantize(quantized, scales, bit_width, self.inputs, self.dtype, self.group_size)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply an input by all matrices and concatenate the results: (…, inputs) → (…, matrices · rows)."""
        return quantized_linear(self, x, bias, lambda: self.dequantize().flatten(0, 1))

    def fake_quantize_input(self, x: Tensor) -> Tensor:
        """Quantize and dequantize the input row by row, if `activation_bits` is below 32."""
        return fake_quantize(x, self.activation_bits, x.shape[-1])

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.buffers()).device

    @property
    def nbytes(self) -> int:
        """Size of all buffers in bytes, including scales."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedWeight":
        """Change the dtype of dequantized weights only. Codes, scales and 16-bit rows keep their dtype."""
        kept_buffers = {
            name: buffer for name, buffer in self._buffers.items() if name.startswith("scales") or name == "rows16"
        }
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        for name, buffer in kept_buffers.items():
            converted = self._buffers[name]
            if buffer is not None and converted is not None and converted.dtype != buffer.dtype:
                self._buffers[name] = converted.to(buffer.dtype) if buffer.is_meta else buffer.to(converted.device)
        return self

    def extra_repr(self) -> str:
        """Return the sizes for `print(model)`."""
        summary = ", ".join(f"{len(self._matrices_at(bit_width))} at {bit_width}" for bit_width in self._bit_widths())
        return f"{self.rows} × {self.inputs}, bits: {summary}"


def quantized_linear(
    quantized: QuantizedWeight,
    x: Tensor,
    bias: Tensor | None,
    weight: Callable[[], Tensor],
    activation_bits: int | None = None,
) -> Tensor:
    """Compute x Wᵀ + b. A decode step uses a faster product if possible, all other calls the dequantized weight.

    Args:
        quantized: The weight.
        x: Input, (…, in).
        bias: Bias, (out,), or None.
        weight: Function that returns the dequantized weight, (out, in).
        activation_bits: Bits of x. None means those of the weight. Split inputs are already quantized head by head.
    """
    if quantized.inputs_are_split:
        activation_bits = FULL_PRECISION
    bits = quantized.activation_bits if activation_bits is None else activation_bits
    tuner = prepacking_tuner(x)
    product = None if tuner is None else _decode_product(tuner, (quantized,), weight, bits, _num_rows(x))
    return linear(fake_quantize(x, bits, x.shape[-1]), weight(), bias) if product is None else product(x, bias)


def try_joint_quantized_linear(weights: tuple[QuantizedWeight, ...], x: Tensor) -> Tensor | None:
    """Multiply one input by several weights in one product in a decode step. Return None if that is not possible."""
    tuner = prepacking_tuner(x)
    if tuner is None:
        return None
    bits = weights[0].activation_bits
    product = _decode_product(tuner, weights, lambda: concatenated_rows(weights), bits, _num_rows(x))
    return None if product is None else product(x, None)


def bind_quantized_linear(
    tuner: MatmulTuner, weights: tuple[QuantizedWeight, ...], rows: int, bias: Tensor | None = None
) -> BoundMatmul | None:
    """Return the product of one input with one or more weights in a decode step, (rows, in) → (rows, out), or None.

    The function has the bits of `quantized_linear` and `try_joint_quantized_linear`. It is valid until a buffer changes.
    """
    if tuner.kernel == "torch" or any(quantized.dtype != torch.float32 for quantized in weights):
        return None
    bits = weights[0].activation_bits
    product = _decode_product(tuner, weights, lambda: concatenated_rows(weights), bits, rows)
    return None if product is None else lambda x: product(x, bias)


def bind_prepacked(
    tuner: MatmulTuner, quantized: QuantizedWeight, weight: Callable[[], Tensor], rows: int
) -> PrepackedMatmul | None:
    """Return the product of decode steps with `weight`, (out, in), which is computed from a quantized weight, or None."""
    if tuner.kernel == "torch" or quantized.dtype != torch.float32:
        return None
    return _decode_product(tuner, (quantized,), weight, FULL_PRECISION, rows)


def concatenated_rows(weights: Sequence[QuantizedWeight]) -> Tensor:
    """Return the dequantized rows of all matrices of all weights, (rows, in)."""
    return torch.cat([quantized.dequantize().flatten(0, 1) for quantized in weights])


def _decode_product(
    tuner: MatmulTuner,
    weights: tuple[QuantizedWeight, ...],
    weight: Callable[[], Tensor],
    activation_bits: int,
    rows: int,
) -> PrepackedMatmul | None:
    """Return the product of decode steps, which also quantizes its input: of 8-bit codes, or of prepacked 16-bit floats."""
    if tuner.int8_inputs and rows == 1 and all(bits <= 8 for quantized in weights for bits in quantized.bits):
        product = _memoized_product(tuner, weights, "dynamic int8", lambda: make_dynamic_int8_matmul(weight()))
        if product is not None:
            return product
    if activation_bits == 8 and all(map(_is_int8_with_row_scales, weights)):
        product = _memoized_product(tuner, weights, "int8", lambda: _make_int8_matmul(weights))
        if product is not None:
            return product
    prepacked = _prepacked_matmul(tuner, weights, weight)
    if prepacked is None or activation_bits == FULL_PRECISION:
        return prepacked
    return lambda x, bias: prepacked(fake_quantize(x, activation_bits, x.shape[-1]), bias)


def _num_rows(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])


def _is_int8_with_row_scales(quantized: QuantizedWeight) -> bool:
    """Return True if all matrices have 8 bits and one scale per row of inputs."""
    return (
        quantized._bit_widths() == [8] and quantized.group_size >= quantized.inputs and not quantized.inputs_are_split
    )


def _make_int8_matmul(weights: tuple[QuantizedWeight, ...]) -> PrepackedMatmul | None:
    codes = [quantized.get_buffer("codes8").flatten(0, 1) for quantized in weights]  # (rows, in) each
    scales = [quantized.get_buffer("scales8").flatten() for quantized in weights]  # (rows,) each
    return make_int8_matmul(codes[0] if len(codes) == 1 else torch.cat(codes), torch.cat(scales))


def _prepacked_matmul(
    tuner: MatmulTuner, weights: tuple[QuantizedWeight, ...], weight: Callable[[], Tensor]
) -> PrepackedMatmul | None:
    return _memoized_product(tuner, weights, "float16", lambda: make_prepacked_matmul(weight()))


def _memoized_product(
    tuner: MatmulTuner, weights: tuple[QuantizedWeight, ...], kind: str, make: Callable[[], PrepackedMatmul | None]
) -> PrepackedMatmul | None:
    """Return the product of these weights, which is made again if a buffer has changed."""
    versions = [
        (buffer.data_ptr(), buffer._version)
        for quantized in weights
        for buffer in quantized._buffers.values()
        if buffer is not None
    ]
    cached = tuner.prepacked.setdefault(weights[0], {})
    key, product = cached.get((kind, len(weights)), (None, None))
    if key != versions:
        product = make()
        cached[kind, len(weights)] = versions, product
    return product


def is_quantized_key(name: str) -> bool:
    """Return True if a name in a state dict belongs to a buffer of a `QuantizedWeight`."""
    return re.search(r"\.(codes|scales|rows)\d+$", name) is not None


class QuantizedLinear(QuantizedWeight):
    """Linear layer with a quantized weight, (out, in)."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        bits: int,
        group_size: int = GROUP_SIZE,
        activation_bits: int = FULL_PRECISION,
    ) -> None:
        super().__init__((bits,), outputs, inputs, group_size, activation_bits)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    @property
    def weight(self) -> Tensor:
        """Dequantized weight, (out, in), a copy."""
        return self.dequantize()[0]

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)"""
        return self.matmul(x, self.bias)


class QuantizedEmbedding(QuantizedWeight):
    """Embedding table with quantized rows."""

    def __init__(self, rows: int, width: int, bits: int, group_size: int = GROUP_SIZE) -> None:
        super().__init__((bits,), rows, width, group_size)

    @property
    def weight(self) -> Tensor:
        """Dequantized weight, (rows, width), a copy."""
        return self.dequantize()[0]

    def forward(self, ids: Tensor) -> Tensor:
        """(…) → (…, width)"""
        return self.dequantize_rows(ids)


class TiedQuantizedLinear(nn.Module):
    """Linear layer that shares the quantized weight of an embedding table."""

    def __init__(self, table: QuantizedEmbedding, bias: bool, activation_bits: int = FULL_PRECISION) -> None:
        super().__init__()
        self._table = (table,)  # in a tuple, so that it does not become a submodule
        self.activation_bits = activation_bits
        self.bias = nn.Parameter(torch.empty(table.rows)) if bias else None

    @property
    def weight(self) -> Tensor:
        """Dequantized weight, (out, in), a copy."""
        return self._table[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)"""
        table = self._table[0]
        return quantized_linear(table, x, self.bias, lambda: table.weight, self.activation_bits)
