"""Query, key, value and output projections with a head axis.

In memory q, k and v share one fused weight, because one matrix product is faster than three. State dicts are split into one
tensor per projection with a head axis, because these can be inspected, sliced and shared:

    q.weight (H, d, D)   k.weight (K, d, D)   v.weight (K, e, D)   and   weight (D, H, e) of the output projection

If heads have quantized weights (`spec.weight_bits`), each projection is a separate `QuantizedWeight`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError
from headwise.heads.collectives_protocol import CollectivesProtocol
from headwise.heads.quantized_layers import (
    QuantizedWeight,
    bind_prepacked,
    bind_quantized_linear,
    quantized_linear,
    try_joint_quantized_linear,
)
from headwise.kernels import RotaryTable
from headwise.kernels.matmul_tuner import BoundMatmul, MatmulTuner, linear
from headwise.spec import AttentionSpec
from headwise.spec.weight_bits import FULL_PRECISION

STORAGES = ("qkv", "q,kv", "q,k,v")


class QKVProjection(nn.Module):
    """Query, key and value projections of a layer.

    Args:
        spec: Configuration of the layer.
        storage: Projections that share one weight in memory: "qkv", "q,kv" or "q,k,v".
        value_width: Width of the input of the value projection, if it differs from the input of the key projection.
    """

    def __init__(self, spec: AttentionSpec, storage: str = "qkv", value_width: int | None = None) -> None:
        super().__init__()
        if storage not in STORAGES:
            raise ArgumentError(f"storage={storage!r}: unknown. Use one of {' | '.join(STORAGES)}.")
        if storage == "qkv" and spec.kv_width != spec.width:
            storage = "q,kv"  # two inputs of different width cannot share a weight
        heads, kv_heads = len(spec.head_ids), len(spec.kv_head_ids)
        self.spec, self.storage = spec, storage
        self.sizes = {"q": (heads, spec.head_dim), "k": (kv_heads, spec.head_dim), "v": (kv_heads, spec.value_dim)}
        input_slices = spec.heads if spec.head_input == "slice" else 1
        value_inputs = spec.kv_width if value_width is None else value_width
        self.input_widths = {
            "q": spec.width // input_slices,
            "k": spec.kv_width // input_slices,
            "v": value_inputs // input_slices,
        }
        bits = {projection: bits_of_present_heads(spec, projection) for projection in "qkv"}
        quantized = {
            projection: head_bits
            for projection, head_bits in bits.items()
            if any(bit_width != FULL_PRECISION for bit_width in head_bits)
        }
        self.fused_groups = tuple("qkv" if quantized else storage.split(","))  # projections that share a weight
        # set if other processes hold copies of KV heads of this layer
        self.sum_kv_grads_in_backward: Callable[[Tensor, str], Tensor] | None = None
        for group in self.fused_groups:
            rows = sum(self._rows(projection) for projection in group)
            if group in quantized:
                assert spec.weight_bits is not None
                sizes = (
                    self.sizes[group][1],
                    self.input_widths[group],
                    spec.weight_bits.group_size,
                    spec.weight_bits.activation_bits,
                )
                self.add_module(group, QuantizedWeight(quantized[group], *sizes))
            else:
                self.register_parameter(f"{group}_weight", nn.Parameter(torch.empty(rows, self.input_widths[group[0]])))
            self.register_parameter(f"{group}_bias", nn.Parameter(torch.empty(rows)) if spec.bias else None)

    def forward(
        self, x: Tensor, source: Tensor | None = None, rotary_table: RotaryTable | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate: (B, T, D), (B, S, D) → q (B, H, T, d), k (B, K, S, d), v (B, K, S, e)."""
        if source is not None:
            return (*self.project(x, "q"), *self.project(source, "kv"))  # pyright: ignore[reportReturnType]
        return self.project(x, "qkv", rotary_table)  # pyright: ignore[reportReturnType]

    def project(self, x: Tensor, projections: str, rotary_table: RotaryTable | None = None) -> tuple[Tensor, ...]:
        """Return some of q, k and v of one input, each (B, heads, T, channels), with as few matrix products as possible.

        If q and k come from one product, they are rotated together.
        """
        out: list[Tensor] = []
        fused = self._fused_quantized(x) if projections == "qkv" else None
        for group in self.fused_groups if fused is None else ("qkv",):
            selected = (
                group
                if group in projections
                else "".join(projection for projection in group if projection in projections)
            )
            if not selected:
                continue
            if self.spec.head_input == "slice":
                outputs = [self._project_slices(x, projection) for projection in selected]
            else:
                product = self._linear(x, group, selected) if fused is None else fused  # (B, T, rows)
                if rotary_table is not None and selected == "qkv":
                    out += self._rotate_qk(product, rotary_table)
                    continue
                outputs = (
                    [product]
                    if len(selected) == 1
                    else product.split([self._rows(projection) for projection in selected], -1)
                )
                outputs = [
                    self._split_heads(output, projection) for projection, output in zip(selected, outputs, strict=True)
                ]
            out += [
                tensor if rotary_table is None or name == "v" else rotary_table.rotate(tensor)
                for name, tensor in zip(selected, outputs, strict=True)
            ]
        return tuple(out)

    def _linear(self, x: Tensor, group: str, selected: str) -> Tensor:
        quantized, bias = self._quantized(group), self._bias(selected)
        if quantized is not None and self.sum_kv_grads_in_backward is None:
            return quantized.matmul(x, bias)
        weight = self._weight(selected)
        if self.sum_kv_grads_in_backward is not None:
            weight = self.sum_kv_grads_in_backward(weight, selected)
            bias = None if bias is None else self.sum_kv_grads_in_backward(bias, selected)
        return linear(self._quantize_input(x, group), weight, bias)

    def _fused_quantized(self, x: Tensor) -> Tensor | None:
        """Compute q, k and v of quantized weights in one product in a decode step. Return None if that is not possible."""
        q, k, v = (self._quantized(projection) for projection in "qkv")
        if (
            q is None
            or k is None
            or v is None
            or self.sum_kv_grads_in_backward is not None
            or self.spec.head_input == "slice"
        ):
            return None
        out = try_joint_quantized_linear((q, k, v), x) if len(set(self.input_widths.values())) == 1 else None
        return out if out is None or not self.spec.bias else out + torch.cat([self._bias(name) for name in "qkv"])  # pyright: ignore

    def bind(self, tuner: MatmulTuner, rows: int) -> BoundMatmul | None:
        """Return the product of a decode step for q, k and v at once, (rows, D) → (rows, outputs), or None.

        `split_and_rotate` returns q, k and v.
        """
        if self.sum_kv_grads_in_backward is not None or self.spec.head_input == "slice":
            return None
        if self.fused_groups == ("qkv",):
            return tuner.bind(self.qkv_weight, self.qkv_bias, rows)  # pyright: ignore[reportArgumentType]
        q, k, v = (self._quantized(projection) for projection in "qkv")
        if q is None or k is None or v is None or len(set(self.input_widths.values())) > 1:
            return None
        bias = torch.cat([self._bias(name) for name in "qkv"]) if self.spec.bias else None  # pyright: ignore
        return bind_quantized_linear(tuner, (q, k, v), rows, bias)

    def split_and_rotate(self, product: Tensor, rotary_table: RotaryTable | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split the product of one token, (B, rows): q (B, H, 1, d), k (B, K, 1, d), v (B, K, 1, e), and rotate q and k."""
        (H, d), (K, e), B = self.sizes["q"], self.sizes["v"], product.shape[0]
        rotated_rows = (H + K) * d
        qk = product.narrow(1, 0, rotated_rows).view(B, H + K, 1, d)
        rotated = qk if rotary_table is None else rotary_table.rotate(qk)
        v = product.narrow(1, rotated_rows, K * e).view(B, K, 1, e)
        return rotated.narrow(1, 0, H), rotated.narrow(1, H, K), v

    def _split_heads(self, product: Tensor, projection: str) -> Tensor:
        return product.reshape(*product.shape[:2], *self.sizes[projection]).transpose(1, 2)

    def _rotate_qk(self, product: Tensor, rotary_table: RotaryTable) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate q and k as the heads of one tensor: (B, T, rows) → (B, H, T, d) (B, K, T, d) (B, K, T, e)."""
        (H, d), (K, _), rows = self.sizes["q"], self.sizes["k"], self._rows("v")
        rotated_rows = (H + K) * d
        qk = product.narrow(-1, 0, rotated_rows).view(*product.shape[:2], H + K, d).transpose(1, 2)
        rotated = rotary_table.rotate(qk)  # narrow and view have less Python overhead than split
        return (
            rotated.narrow(1, 0, H),
            rotated.narrow(1, H, K),
            self._split_heads(product.narrow(-1, rotated_rows, rows), "v"),
        )

    def _project_slices(self, x: Tensor, projection: str) -> Tensor:
        """Project the slice of the residual stream that belongs to each head, as a grouped 1×1 convolution."""
        heads = torch.tensor(self.spec.head_ids, dtype=torch.long, device=x.device)
        slices = x.unflatten(-1, (self.spec.heads, -1)).index_select(2, heads)  # (B, T, H, D/heads)
        slices = self._quantize_input(slices, projection)
        out = torch.einsum("bthc,hdc->bhtd", slices, self.weight_by_head(projection))  # (B, H, T, d)
        bias = self.bias_by_head(projection)
        return out if bias is None else out + bias[:, None]

    def weight_by_head(self, projection: str) -> Tensor:
        """Return a view of the weight of one projection with a head axis: (heads, channels, width)."""
        return self._weight(projection).unflatten(0, self.sizes[projection])

    def bias_by_head(self, projection: str) -> Tensor | None:
        """Return a view of the bias of one projection, (heads, channels), or None."""
        bias = self._bias(projection)
        return None if bias is None else bias.unflatten(0, self.sizes[projection])

    @torch.no_grad()
    def fuse_qkv(self) -> None:
        """Fuse q, k and v into one weight (a copy), if possible, so that one product computes all three."""
        if (
            self.fused_groups != ("q", "k", "v")
            or len(set(self.input_widths.values())) > 1
            or any(map(self._quantized, self.fused_groups))
        ):
            return
        for kind in ("weight", "bias") if self.spec.bias else ("weight",):
            pieces = [self._parameters.pop(f"{projection}_{kind}") for projection in "qkv"]
            requires_grad = all(piece.requires_grad for piece in pieces if piece is not None)
            self.register_parameter(f"qkv_{kind}", nn.Parameter(torch.cat(pieces), requires_grad))  # pyright: ignore
        if not self.spec.bias:
            for projection in "qkv":
                del self._parameters[f"{projection}_bias"]
            self.register_parameter("qkv_bias", None)
        self.storage, self.fused_groups = "qkv", ("qkv",)

    def _rows(self, projection: str) -> int:
        heads, channels = self.sizes[projection]
        return heads * channels

    def _weight(self, projections: str) -> Tensor:
        group, rows = self._locate_rows(projections)
        quantized = self._quantized(group)
        if quantized is not None:
            return quantized.dequantize().flatten(0, 1)
        weight = getattr(self, f"{group}_weight")
        return weight if projections == group else weight[rows]  # a slice would cost a copy in the backward pass

    def _quantized(self, group: str) -> QuantizedWeight | None:
        module = self._modules.get(group)
        return module if isinstance(module, QuantizedWeight) else None

    def _quantize_input(self, x: Tensor, group: str) -> Tensor:
        quantized = self._quantized(group)
        return x if quantized is None else quantized.fake_quantize_input(x)

    def _bias(self, projections: str) -> Tensor | None:
        group, rows = self._locate_rows(projections)
        bias = getattr(self, f"{group}_bias")
        return bias if bias is None or projections == group else bias[rows]

    def _locate_rows(self, projections: str) -> tuple[str, slice]:
        """Return the fused weight that contains adjacent projections, and their rows in it."""
        if projections in self.fused_groups:
            return projections, slice(None)
        group = next(group for group in self.fused_groups if projections in group)
        start = sum(self._rows(projection) for projection in group[: group.index(projections)])
        return group, slice(start, start + sum(self._rows(projection) for projection in projections))

    # State dicts are split, memory is fused.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for projection in "qkv":
            # quantized weights are submodules and save themselves
            weight = None if self._quantized(projection) else self.weight_by_head(projection)
            for kind, value in (("weight", weight), ("bias", self.bias_by_head(projection))):
                if value is not None:
                    destination[f"{prefix}{projection}.{kind}"] = value if keep_vars else value.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for group in self.fused_groups:
            for kind in ("weight", "bias") if self.spec.bias else ("weight",):
                if f"{prefix}{group}_{kind}" in state_dict or (kind == "weight" and self._quantized(group)):
                    continue  # already fused, or a submodule that loads itself
                keys = [f"{prefix}{projection}.{kind}" for projection in group]
                missing_keys += [key for key in keys if key not in state_dict]
                pieces = [state_dict.pop(key) for key in keys if key in state_dict]
                mismatches = [
                    f"size mismatch for {key}: the shape is {tuple(piece.shape)}, expected {self._shape(projection, kind)}."
                    for key, piece, projection in zip(keys, pieces, group, strict=False)
                    if len(pieces) == len(keys) and tuple(piece.shape) != self._shape(projection, kind)
                ]
                error_msgs += mismatches
                if len(pieces) == len(keys) and not mismatches:
                    flat = [piece.flatten(0, 1) if kind == "weight" else piece.flatten() for piece in pieces]
                    state_dict[f"{prefix}{group}_{kind}"] = flat[0] if len(flat) == 1 else torch.cat(flat)
        reported_keys: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, reported_keys, unexpected_keys, error_msgs
        )

    def _shape(self, projection: str, kind: str) -> tuple[int, ...]:
        return (*self.sizes[projection], self.input_widths[projection]) if kind == "weight" else self.sizes[projection]


def bits_of_present_heads(spec: AttentionSpec, projection: str) -> tuple[int, ...]:
    """Return the bits per weight of each remaining head, or of each remaining KV head for k and v."""
    present_ids = spec.head_ids if projection in "qo" else spec.kv_head_ids
    return tuple(
        FULL_PRECISION if spec.weight_bits is None else getattr(spec.weight_bits, projection)[head_id]
        for head_id in present_ids
    )


class OutputProjection(nn.Module):
    """The output projection W_O, from z of all heads to the residual stream. In memory (D, H·e), in state dicts (D, H, e).

    If other processes hold heads of the layer, the outputs of all processes are summed before the bias is added.
    """

    collectives: CollectivesProtocol | None = None

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.heads, self.value_dim = len(spec.head_ids), spec.value_dim
        self.weight = nn.Parameter(torch.empty(spec.width, self.heads * self.value_dim))
        self.bias = nn.Parameter(torch.empty(spec.width)) if spec.out_bias else None

    def forward(self, z: Tensor) -> Tensor:
        """Concatenate z of all heads and project it: (B, H, T, e) → (B, T, D)."""
        concatenated = z.transpose(1, 2).flatten(2)
        if self.collectives is None:
            return linear(concatenated, self.weight, self.bias)
        summed = self.collectives.sum(linear(concatenated, self.weight))
        return summed if self.bias is None else summed + self.bias

    def bind(self, tuner: MatmulTuner, rows: int) -> BoundMatmul | None:
        """Return the projection of a decode step, (rows, H, 1, e) → (rows, D), or None without a tuned product."""
        product = None if self.collectives is not None else tuner.bind(self.weight, self.bias, rows)
        return None if product is None else lambda z: product(z.reshape(rows, -1))

    @property
    def head_output_weights(self) -> Tensor:
        """View of W_O of each head, (H, e, D)."""
        return self.weight.unflatten(1, (self.heads, self.value_dim)).permute(1, 2, 0)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        weight = self.weight.unflatten(1, (self.heads, self.value_dim))
        destination[f"{prefix}weight"] = weight if keep_vars else weight.detach()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        key = f"{prefix}weight"
        if key in state_dict and tuple(state_dict[key].shape) == (len(self.weight), self.heads, self.value_dim):
            state_dict[key] = state_dict[key].flatten(1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class QuantizedOutputProjection(OutputProjection):
    """Output projection with quantized weights. Groups lie within the channels of one head."""

    def __init__(self, spec: AttentionSpec) -> None:
        nn.Module.__init__(self)
        assert spec.weight_bits is not None
        self.heads, self.value_dim = len(spec.head_ids), spec.value_dim
        sizes = (spec.width, spec.value_dim, spec.weight_bits.group_size, spec.weight_bits.activation_bits)
        self.quantized = QuantizedWeight(bits_of_present_heads(spec, "o"), *sizes)  # (H, D, e)
        self.quantized.inputs_are_split = True
        self.bias = nn.Parameter(torch.empty(spec.width)) if spec.out_bias else None

    def forward(self, z: Tensor) -> Tensor:
        """(B, H, T, e) → (B, T, D)"""
        z = self.quantized.fake_quantize_input(z)
        if self.collectives is not None:
            return super().forward(z)
        return quantized_linear(self.quantized, z.transpose(1, 2).flatten(2), self.bias, lambda: self.weight)

    def bind(self, tuner: MatmulTuner, rows: int) -> BoundMatmul | None:
        """Return the projection of a decode step, (rows, H, 1, e) → (rows, D), or None without a prepacked product."""
        product = (
            None if self.collectives is not None else bind_prepacked(tuner, self.quantized, lambda: self.weight, rows)
        )
        if product is None:
            return None
        return lambda z: product(self.quantized.fake_quantize_input(z).reshape(rows, -1), self.bias)

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Dequantized weight, (D, H·e), a copy."""
        return self.quantized.dequantize().transpose(0, 1).flatten(1)

    @property
    def head_output_weights(self) -> Tensor:
        """Dequantized W_O of each head, (H, e, D), a copy."""
        return self.quantized.dequantize().mT

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        nn.Module._load_from_state_dict(self, *args, **kwargs)


def prune_quantized_state(
    state: dict[str, Tensor], prefix: str, layer: "NativeAttentionProtocol", after: AttentionSpec
) -> None:
    """Keep only the quantized weights of the heads in `after` in a state dict. Weights become floats if none is quantized."""
    before = layer.spec
    for projection in "qkvo":
        quantized = (
            getattr(layer.output_projection, "quantized", None)
            if projection == "o"
            else layer.qkv._quantized(projection)
        )
        if not isinstance(quantized, QuantizedWeight):
            continue
        ids_before, ids_after = (
            (before.head_ids, after.head_ids) if projection in "qo" else (before.kv_head_ids, after.kv_head_ids)
        )
        name = f"{prefix}output_projection.quantized" if projection == "o" else f"{prefix}qkv.{projection}"
        for buffer_name, _ in quantized.named_buffers():
            state.pop(f"{name}.{buffer_name}")
        selected = quantized.select_matrix_buffers([ids_before.index(number) for number in ids_after])
        if any(bits != FULL_PRECISION for bits in bits_of_present_heads(after, projection)):
            state |= {f"{name}.{buffer_name}": tensor for buffer_name, tensor in selected.items()}
            continue
        empty = torch.empty(0, quantized.rows, quantized.inputs, dtype=quantized.dtype, device=quantized.device)
        rows = selected.get("rows32", empty)
        state[f"{name.removesuffix('.quantized')}.weight"] = rows.transpose(0, 1) if projection == "o" else rows


class NativeAttentionProtocol(Protocol):
    """A native attention layer."""

    spec: AttentionSpec
    qkv: QKVProjection
    output_projection: OutputProjection


def make_output_projection(spec: AttentionSpec) -> OutputProjection:
    """Create the output projection of a layer, quantized if any of its heads is."""
    return (
        QuantizedOutputProjection(spec)
        if any(bits != FULL_PRECISION for bits in bits_of_present_heads(spec, "o"))
        else OutputProjection(spec)
    )
