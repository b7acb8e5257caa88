"""Which axis of a tensor is shared out over processes, and who has which of its entries: one table, used both ways.

Names are those of a whole model's state dict, with a head axis: q, k and v (heads, channels, D), W_O (D, heads, e).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.heads.projections import bits_here
from headwise.kernels.collectives import Together
from headwise.spec import AttentionSpec, ModelSpec, SiteAddress
from headwise.spec.partition import Share
from headwise.spec.weight_bits import FULL

LAYER = re.compile(r"(encoder_blocks|blocks)\.(\d+)\.(attention|cross)\.(.+)")
HELD = re.compile(r"(codes|scales|rows)(\d+)")


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor, and for each process the places of its entries there."""

    dim: int
    places: tuple[Sequence[int], ...]

    def cut(self, tensor: Tensor, process: int) -> Tensor:
        """What one process has: a view where its entries are neighbours."""
        mine = self.places[process]
        if isinstance(mine, range) or list(mine) == list(range(mine[0], mine[-1] + 1) if mine else ()):
            return tensor.narrow(self.dim, mine[0] if mine else 0, len(mine))
        return tensor.index_select(self.dim, torch.tensor(mine, dtype=torch.long, device=tensor.device))

    def whole(self, piece: Tensor, together: Together) -> Tensor:
        """The whole tensor from everybody's pieces; of entries that several have, the first."""
        pieces = together.pieces(piece, self.dim, [len(some) for some in self.places])
        shape = list(piece.shape)
        shape[self.dim] = len({place for some in self.places for place in some})
        made = piece.new_zeros(shape)
        for there, some in reversed(list(zip(self.places, pieces, strict=True))):
            made.index_copy_(self.dim, torch.tensor(list(there), dtype=torch.long, device=piece.device), some)
        return made


def axis_of(name: str, spec: ModelSpec, shares: Sequence[Share]) -> Axis | None:
    """The axis along which a tensor of a whole model is shared out; None where every process has all of it."""
    found = LAYER.fullmatch(name)
    if found is not None:
        stack, layer, kind, rest = found.groups()
        site = site_at(spec, stack, int(layer), kind)
        return _in_layer(rest, spec.attention_at(site), [share.by_layer[str(site)] for share in shares])
    if (part := re.fullmatch(r".*\.mlp\.(up|gate|down)\.(.+)", name)) is not None:
        return _in_mlp(part[1], part[2], spec, [range(*share.hidden) for share in shares])
    if (part := re.fullmatch(r"(embed\.tokens|output\.vocabulary)\.(.+)", name)) is not None:
        return Axis(1 if HELD.fullmatch(part[2]) else 0, tuple(range(*share.vocab) for share in shares))
    return None


def site_at(spec: ModelSpec, stack: str, layer: int, kind: str) -> SiteAddress:
    """The address of a layer by its place among the modules."""
    if spec.kind != "encoder-decoder":
        return SiteAddress("", layer)
    return SiteAddress("enc" if stack == "encoder_blocks" else "dec" if kind == "attention" else "cross", layer)


def _in_layer(rest: str, whole: AttentionSpec, heads: list[tuple[int, ...]]) -> Axis | None:
    head_places = tuple([whole.head_ids.index(number) for number in some] for some in heads)
    keys = [whole.keep(some).kv_ids for some in heads]
    key_places = tuple([whole.kv_ids.index(number) for number in some] for some in keys)
    if rest == "write.bias":
        return None
    if rest == "write.weight":
        return Axis(1, head_places)
    letter = "o" if rest.startswith("write.") else rest.removeprefix("read.")[0] if rest.startswith("read.") else "q"
    places = key_places if letter in "kv" else head_places
    held = HELD.fullmatch(rest.rsplit(".", 1)[-1])
    if held is None:
        return Axis(0, places)
    alike = [unit for unit, bits in enumerate(bits_here(whole, letter)) if bits == int(held[2])]
    return Axis(0, tuple([alike.index(place) for place in some if place in alike] for some in places))


def _in_mlp(part: str, rest: str, spec: ModelSpec, hidden: list[range]) -> Axis | None:
    held = HELD.fullmatch(rest)
    if part != "down":
        return Axis(1 if held else 0, tuple(hidden))
    if rest == "bias":
        return None
    if held is None:
        return Axis(1, tuple(hidden))
    bits, group = spec.bits_of("mlp")
    group = min(group, spec.hidden)
    borders = [(-(-some.start // group), -(-some.stop // group)) for some in hidden]
    if held[1] == "rows":
        borders = [(some.start, some.stop) for some in hidden]
    elif held[1] == "codes":
        borders = [(some.start * bits // 8, -(-some.stop * bits // 8)) for some in hidden]
    return Axis(2, tuple(range(*some) for some in borders))


def cut(name: str, tensor: Tensor, spec: ModelSpec, shares: Sequence[Share], process: int) -> dict[str, Tensor]:
    """What one process has of a tensor, by name; views where that can be, nothing where it has none of its kind.

    A tensor may come under its name in a state dict, or under that of a parameter: q, k and v fused, W_O without head axis.
    """
    made: dict[str, Tensor] = {}
    for split, piece in _split(name, tensor, spec):
        axis = axis_of(split, spec, shares)
        mine = piece if axis is None else axis.cut(piece, process)
        held = HELD.fullmatch(split.rsplit(".", 1)[-1])
        if held is None or mine.shape[0]:
            made[split] = mine
    return made


def _split(name: str, tensor: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    found = LAYER.fullmatch(name)
    if found is None:
        yield name, tensor
        return
    stack, number, kind, rest = found.groups()
    layer = spec.attention_at(site_at(spec, stack, int(number), kind))
    fused = re.fullmatch(r"read\.(qkv|kv|q|k|v)_(weight|bias)", rest)
    if rest == "write.weight" and tensor.ndim == 2:
        yield name, tensor.unflatten(1, (len(layer.head_ids), layer.value_dim))
    elif fused is None:
        yield name, tensor
    else:
        sizes = {
            "q": (len(layer.head_ids), layer.head_dim),
            "k": (len(layer.kv_ids), layer.head_dim),
            "v": (len(layer.kv_ids), layer.value_dim),
        }
        pieces = tensor.split([sizes[letter][0] * sizes[letter][1] for letter in fused[1]])
        for letter, piece in zip(fused[1], pieces, strict=True):
            before = name.removesuffix(rest)
            yield f"{before}read.{letter}.{fused[2]}", piece.unflatten(0, sizes[letter])


def unpacked_names(state: dict[str, Tensor], local: ModelSpec) -> dict[str, Tensor]:
    """A state in which letters of which no head here is packed are plain weights, as the smaller model has them."""
    made = dict(state)
    for name in state:
        found = LAYER.fullmatch(name)
        if found is None or not found[4].endswith(".rows32"):
            continue
        layer = local.attention_at(site_at(local, found[1], int(found[2]), found[3]))
        letter = "o" if found[4].startswith("write.") else found[4].removeprefix("read.")[0]
        if all(bits == FULL for bits in bits_here(layer, letter)):
            plain = name.replace(".packed.rows32", ".weight").replace(".rows32", ".weight")
            rows = made.pop(name)
            made[plain] = rows.transpose(0, 1) if letter == "o" else rows
    return made


def check_whole(spec: ModelSpec, what: str) -> None:
    """Refuse what is not done with weights at few bits in parts."""
    if spec.weights:
        raise HeadwiseError(f"weights at few bits cannot be {what} in parts; use the whole model.")
