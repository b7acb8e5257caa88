"""One head, or the heads that share keys, with its weights or its cache at few bits, while a context is open.

Weights are written in place and put back bitwise, also after an error or Ctrl-C.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.balanced_basis import Matrices
from headwise.heads.head import HasHeads
from headwise.heads.hook_point import Seen, gated
from headwise.kernels import run
from headwise.kernels.quantization import rounded
from headwise.spec import Address, select
from headwise.spec.weight_bits import check_bits

WEIGHTS = ("qk", "vo")
PARTS = (*WEIGHTS, "keys", "values")


@dataclass(frozen=True)
class AtBits:
    """What is stored at few bits: a pair of matrices, or the cached keys or values, of one key head and all who read it."""

    key: str  # the key head; where heads share none, the head itself
    heads: tuple[str, ...]  # that read it
    part: str
    bits: int


def questions(
    layer: HasHeads, heads: tuple[Address, ...], parts: tuple[str, ...], bits: tuple[int, ...]
) -> list[AtBits]:
    """What can be asked of a layer; a key head is asked about if any of its heads is."""
    spec, site, made = layer.spec, layer.site.address, []
    for key, number in enumerate(spec.kv_ids):
        readers = [head for head, its in zip(spec.head_ids, spec.kv_of_head, strict=True) if its == key]
        if any(site.head(head) in heads for head in readers):
            named = tuple(str(site.head(head)) for head in readers)
            made += [AtBits(str(site.head(number)), named, part, count) for part in parts for count in bits]
    return made


def check_parts(parts: tuple[str, ...], bits: tuple[int, ...]) -> None:
    """Refuse parts and bits nobody has."""
    for part in parts:
        if part not in PARTS:
            raise HeadwiseError(f"a head has the parts {', '.join(PARTS)}; got {part!r}.")
    for count in bits:
        check_bits(count)
    if not parts or not bits:
        raise HeadwiseError("say which parts and how many bits: parts=('qk', 'vo'), bits=(4,).")


@contextmanager
def at_few_bits(layer: HasHeads, setting: AtBits, base: Matrices, group: int, clean: Seen | None) -> Iterator[None]:
    """While open, this part of these heads is as it comes back from so many bits.

    `base` are the layer's weights in the basis they are rounded in; of cached keys and values, `clean` is the call.
    """
    spec = layer.spec
    heads = [spec.head_ids.index(Address.parse(head).head) for head in setting.heads]
    key = spec.kv_ids.index(Address.parse(setting.key).head)
    if setting.part not in WEIGHTS:
        assert clean is not None
        with layer.site.replaced(lambda z: _cached(layer, clean, setting, key).to(z)):
            yield
        return
    changes = list(_changes(Matrices.of(layer), base, setting, heads, key, group))
    before = [live.clone() for live, _ in changes]
    try:
        for live, new in changes:
            live.copy_(new)
        yield
    finally:
        for (live, _), old in zip(changes, before, strict=True):
            live.copy_(old)


def _changes(
    live: Matrices, base: Matrices, setting: AtBits, heads: list[int], key: int, group: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each matrix that is written, and what is written."""
    if setting.part == "qk":
        yield live.k[key], rounded(base.k[key], setting.bits, group)
        if live.b_k is not None and base.b_k is not None:
            yield live.b_k[key], base.b_k[key]
        for head in heads:
            yield live.q[head], rounded(base.q[head], setting.bits, group)
            if live.b_q is not None and base.b_q is not None:
                yield live.b_q[head], base.b_q[head]
        return
    yield live.v[key], rounded(base.v[key], setting.bits, group)
    if live.b_v is not None and base.b_v is not None:
        yield live.b_v[key], base.b_v[key]
    for head in heads:
        yield live.o[head], rounded(base.o[head].mT.contiguous(), setting.bits, group).mT  # along its own channels


def _cached(layer: HasHeads, clean: Seen, setting: AtBits, key: int) -> Tensor:
    """What heads find when the keys, or the values, of one key head come back from a cache: (B, H, T, e)."""
    k, v = clean.k.clone(), clean.v.clone()
    held = k if setting.part == "keys" else v
    held[:, key] = rounded(held[:, key], setting.bits)
    z = run(clean.q, k, v, clean.terms)
    return z if layer.gate is None else gated(z, layer.gate)


def check_in_place(layer: HasHeads) -> None:
    """Refuse weights that are not there to be written: packed, or shown as a copy."""
    live = Matrices.of(layer)
    own = {tensor.untyped_storage().data_ptr() for tensor in layer_parameters(layer)}
    for tensor in (live.q, live.k, live.v, live.o):
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in own:
            raise HeadwiseError(
                f"weights of layer {layer.site.address} are packed or shown as a copy and cannot be rounded and put back; "
                f"a model of hw.quantise is unpacked by hw.dequantise."
            )


def layer_parameters(layer: HasHeads) -> Iterator[Tensor]:
    """The parameters of a layer, ours or not."""
    module = layer if isinstance(layer, torch.nn.Module) else layer.module  # pyright: ignore[reportAttributeAccessIssue]
    yield from module.parameters()
    writes = getattr(getattr(layer, "found", None), "writes", None)
    if writes is not None:
        yield from writes.parameters()


def chosen_heads(pattern: object, every: tuple[Address, ...]) -> tuple[Address, ...]:
    """The heads a pattern names; a star alone is all, in whatever stack."""
    return every if pattern == "*" else select(pattern, every)  # pyright: ignore[reportArgumentType]
