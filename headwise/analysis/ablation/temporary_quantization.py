"""One head, or the heads that share keys, with its weights or its cache at few bits, while a context is open.

Weights are written in place and put back bitwise, also after an error or Ctrl-C.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
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
    """What is stored at few bits: a pair of matrices, or the cached keys or values, of one key head and all who read it."""

    kv_head: str  # the key head; where heads share none, the head itself
    heads: tuple[str, ...]  # that read it
    part: str
    bits: int


def quantization_targets(
    layer: AttentionLayerProtocol, heads: tuple[Address, ...], parts: tuple[str, ...], bits: tuple[int, ...]
) -> list[QuantizationTarget]:
    """What can be asked of a layer; a key head is asked about if any of its heads is."""
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
    """Refuse parts and bits nobody has."""
    for part in parts:
        if part not in PARTS:
            raise HeadwiseError(f"a head has the parts {', '.join(PARTS)}; got {part!r}.")
    for num_bits in bits:
        check_bits(num_bits)
    if not parts or not bits:
        raise HeadwiseError("say which parts and how many bits: parts=('qk', 'vo'), bits=(4,).")


@contextmanager
def quantized_part(
    layer: AttentionLayerProtocol,
    target: QuantizationTarget,
    base: LayerHeadMatrices,
    group_size: int,
    clean_call: AttentionCall | None,
) -> Iterator[None]:
    """While open, this part of these heads is as it comes back from so many bits.

    `base` are the layer's weights in the basis they are rounded in; of cached keys and values, `clean_call` is the call.
    """
    spec = layer.spec
    heads = [spec.head_ids.index(Address.parse(head).head) for head in target.heads]
    kv_index = spec.kv_head_ids.index(Address.parse(target.kv_head).head)
    if target.part not in WEIGHT_PARTS:
        assert clean_call is not None
        with layer.hook_point.replaced(lambda z: _quantized_cache_output(layer, clean_call, target, kv_index).to(z)):
            yield
        return
    changes = list(_weight_changes(LayerHeadMatrices.from_layer(layer), base, target, heads, kv_index, group_size))
    originals = [live.clone() for live, _ in changes]
    try:
        for live, new in changes:
            live.copy_(new)
        yield
    finally:
        for (live, _), old in zip(changes, originals, strict=True):
            live.copy_(old)


def _weight_changes(
    live: LayerHeadMatrices,
    base: LayerHeadMatrices,
    target: QuantizationTarget,
    heads: list[int],
    kv_index: int,
    group_size: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each matrix that is written, and what is written."""
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
        # along its own channels
        yield live.o[head], fake_quantize(base.o[head].mT.contiguous(), target.bits, group_size).mT


def _quantized_cache_output(
    layer: AttentionLayerProtocol, clean_call: AttentionCall, target: QuantizationTarget, kv_index: int
) -> Tensor:
    """What heads find when the keys, or the values, of one key head come back from a cache: (B, H, T, e)."""
    k, v = clean_call.k.clone(), clean_call.v.clone()
    cached = k if target.part == "keys" else v
    cached[:, kv_index] = fake_quantize(cached[:, kv_index], target.bits)
    z = run_kernel(clean_call.q, k, v, clean_call.params)
    return z if layer.gate is None else apply_gate(z, layer.gate)


def check_writable(layer: AttentionLayerProtocol) -> None:
    """Refuse weights that are not there to be written: packed, or shown as a copy."""
    live = LayerHeadMatrices.from_layer(layer)
    own_storage = {tensor.untyped_storage().data_ptr() for tensor in layer_parameters(layer)}
    for tensor in (live.q, live.k, live.v, live.o):
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in own_storage:
            raise HeadwiseError(
                f"weights of layer {layer.hook_point.address} are packed or shown as a copy and cannot be rounded "
                f"and put back; a model of hw.quantize is unpacked by hw.dequantize."
            )


def layer_parameters(layer: AttentionLayerProtocol) -> Iterator[Tensor]:
    """The parameters of a layer, ours or not."""
    module = layer if isinstance(layer, torch.nn.Module) else layer.module  # pyright: ignore[reportAttributeAccessIssue]
    yield from module.parameters()
    output_module = getattr(getattr(layer, "info", None), "output_module", None)
    if output_module is not None:
        yield from output_module.parameters()


def resolve_heads(pattern: object, available: tuple[Address, ...]) -> tuple[Address, ...]:
    """The heads a pattern names; a star alone is all, in whatever stack."""
    return available if pattern == "*" else select(pattern, available)  # pyright: ignore[reportArgumentType]
