"""Quantize the weights or the cached keys and values of one KV head while a context is open.

Weights are changed in place and restored bitwise, also after an error or Ctrl-C.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.heads.balanced_basis import LayerHeadMatrices
from headwise.heads.head import AttentionLayerProtocol
from headwise.heads.hook_point import AttentionCall, apply_gate
from headwise.kernels import run_kernel
from headwise.kernels.quantization import fake_quantize
from headwise.spec import Address, select
from headwise.spec.weight_bits import check_bits

WEIGHT_PARTS = ("qk", "vo")
PARTS = (*WEIGHT_PARTS, "keys", "values")


@dataclass(frozen=True)
class QuantizationTarget:
    """One part of a KV head to quantize, together with the query heads that use it.

    Attributes:
        kv_head: Address of the KV head. Equal to the query head in multi-head attention.
        heads: Addresses of the query heads that use it.
        part: "qk" (W_Q and W_K), "vo" (W_V and W_O), "keys" or "values" (cached).
        bits: Bits per value.
    """

    kv_head: str
    heads: tuple[str, ...]
    part: str
    bits: int


def quantization_targets(
    layer: AttentionLayerProtocol, heads: tuple[Address, ...], parts: tuple[str, ...], bits: tuple[int, ...]
) -> list[QuantizationTarget]:
    """List the targets of a layer. A KV head is included if any of its query heads is selected."""
    spec, layer_address, targets = layer.spec, layer.hook_point.address, []
    for kv_id, readers in zip(spec.kv_head_ids, spec.heads_of_kv, strict=True):
        if any(layer_address.head_address(head) in heads for head in readers):
            reader_names = tuple(str(layer_address.head_address(head)) for head in readers)
            targets += [
                QuantizationTarget(str(layer_address.head_address(kv_id)), reader_names, part, num_bits)
                for part in parts
                for num_bits in bits
            ]
    return targets


def check_parts(parts: tuple[str, ...], bits: tuple[int, ...]) -> None:
    """Raise if a part or a number of bits is invalid, or if none is given."""
    for part in parts:
        if part not in PARTS:
            raise ArgumentError(f"parts: unknown part. Got {part!r}. Use one or more of {', '.join(PARTS)}.")
    for num_bits in bits:
        check_bits(num_bits)
    if not parts or not bits:
        raise ArgumentError(
            f"parts, bits: both must be non-empty. Got parts={parts}, bits={bits}. "
            f"For example parts=('qk', 'vo'), bits=(4,)."
        )


@contextmanager
def temporarily_quantized_part(
    layer: AttentionLayerProtocol,
    target: QuantizationTarget,
    base: LayerHeadMatrices,
    group_size: int,
    clean_call: AttentionCall | None,
) -> Iterator[None]:
    """Quantize one part of a KV head while the context is open.

    Args:
        layer: The attention layer of the head.
        target: KV head, part and bits.
        base: Weights of the layer in the basis in which they are quantized.
        group_size: Number of weights that share a quantization scale.
        clean_call: The layer's call in the unmodified model. Required for cached keys and values.
    """
    spec = layer.spec
    heads = [spec.head_ids.index(Address.parse(head).head) for head in target.heads]
    kv_index = spec.kv_head_ids.index(Address.parse(target.kv_head).head)
    if target.part not in WEIGHT_PARTS:
        assert clean_call is not None
        with layer.hook_point.replaced(lambda z: _quantized_cache_output(layer, clean_call, target, kv_index).to(z)):
            yield
        return
    changes = list(
        _tensors_and_new_values(LayerHeadMatrices.from_layer(layer), base, target, heads, kv_index, group_size)
    )
    originals = [live.clone() for live, _ in changes]
    try:
        for live, new in changes:
            live.copy_(new)
        yield
    finally:
        for (live, _), old in zip(changes, originals, strict=True):
            live.copy_(old)


def _tensors_and_new_values(
    live: LayerHeadMatrices,
    base: LayerHeadMatrices,
    target: QuantizationTarget,
    heads: list[int],
    kv_index: int,
    group_size: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor to change, and its new values."""
    if target.part == "qk":
        yield live.k[kv_index], fake_quantize(base.k[kv_index], target.bits, group_size)
        if live.b_k is not None and base.b_k is not None:
            yield live.b_k[kv_index], base.b_k[kv_index]
        for head in heads:
            yield live.q[head], fake_quantize(base.q[head], target.bits, group_size)
            if live.b_q is not None and base.b_q is not None:
                yield live.b_q[head], base.b_q[head]
        return
    yield live.v[kv_index], fake_quantize(base.v[kv_index], target.bits, group_size)
    if live.b_v is not None and base.b_v is not None:
        yield live.b_v[kv_index], base.b_v[kv_index]
    for head in heads:
        # groups along the head's channels
        yield live.o[head], fake_quantize(base.o[head].mT.contiguous(), target.bits, group_size).mT


def _quantized_cache_output(
    layer: AttentionLayerProtocol, clean_call: AttentionCall, target: QuantizationTarget, kv_index: int
) -> Tensor:
    """Compute z with quantized keys or values of one KV head: (B, H, T, e)."""
    k, v = clean_call.k.clone(), clean_call.v.clone()
    cached = k if target.part == "keys" else v
    cached[:, kv_index] = fake_quantize(cached[:, kv_index], target.bits)
    z = run_kernel(clean_call.q, k, v, clean_call.params)
    z = z if clean_call.token_gate is None else z * clean_call.token_gate
    return z if layer.gate is None else apply_gate(z, layer.gate)


def check_writable(layer: AttentionLayerProtocol) -> None:
    """Raise if the weights of a layer are packed or copies and cannot be changed in place."""
    live = LayerHeadMatrices.from_layer(layer)
    own_storage = {tensor.untyped_storage().data_ptr() for tensor in layer_parameters(layer)}
    for tensor in (live.q, live.k, live.v, live.o):
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in own_storage:
            raise UnsupportedModelError(
                f"layer {layer.hook_point.address}: its weights are packed or accessible only as a copy, so they cannot be "
                f"quantized temporarily. If the model comes from hw.quantize, call hw.dequantize first."
            )


def layer_parameters(layer: AttentionLayerProtocol) -> Iterator[Tensor]:
    """Yield the parameters of a headwise or attached layer."""
    module = layer if isinstance(layer, torch.nn.Module) else layer.module  # pyright: ignore[reportAttributeAccessIssue]
    yield from module.parameters()
    output_module = getattr(getattr(layer, "info", None), "output_module", None)
    if output_module is not None:
        yield from output_module.parameters()


def resolve_heads(pattern: object, available: tuple[Address, ...]) -> tuple[Address, ...]:
    """Resolve a head pattern. "*" selects all heads of every stack."""
    return available if pattern == "*" else select(pattern, available)  # pyright: ignore[reportArgumentType]
