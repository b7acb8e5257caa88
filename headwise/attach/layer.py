"""One attention layer of somebody else's model, with the face of our own: its site, its sizes, live views of its weights."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.attach.find import Found, is_turned
from headwise.errors import HeadwiseError
from headwise.heads.site import Site
from headwise.spec import AttentionSpec, Rotary

if TYPE_CHECKING:
    from headwise.attach.masks import Masks


class Layer:
    """What `Heads` and `Head` ask of a layer, over a module that is not ours."""

    gate: Tensor | None = None  # a gate that the model itself has learned; theirs have none

    def __init__(self, found: Found, masks: "Masks") -> None:
        self.found, self.masks = found, masks
        self.module = found.module
        width = 0 if found.writes is None else matrix(found.writes).shape[0]
        self.spec = AttentionSpec(
            width=width or found.heads * found.head_dim, heads=found.heads, head_dim=found.head_dim,
            value_dim=found.value_dim, kv_heads=found.kv_heads, kept=found.kept, rotary=Rotary() if found.rotary else None,
            window=found.window,
        )  # fmt: skip
        self.read, self.write = Reads(self), Writes(self)
        self.site = Site(found.address, self.spec.head_ids, self.write, found.window)
        heads, keys = len(self.spec.head_ids), len(self.spec.kv_ids)
        even = tuple(head * keys // heads for head in range(heads)) if heads and heads % keys == 0 else ()
        self.uneven = self.spec.kv_of_head != even  # whether groups differ in size, as cutting may leave them

    def without(self, gone: set[int]) -> AttentionSpec:
        """The sizes of this layer when some heads, by number, are gone."""
        return replace(self.spec, kept=tuple(number for number in self.spec.head_ids if number not in gone))

    def register_forward_pre_hook(self, hook: Any) -> Any:
        """Show what the layer reads, (B, T, D), before it does: the first argument of what projects q."""
        return self.found.read(0).register_forward_pre_hook(hook)

    @property
    def b_O(self) -> Tensor | None:
        """The output bias, (D,)."""
        return None if self.found.writes is None else self.found.writes.bias  # pyright: ignore[reportReturnType]


class Writes:
    """The output projection, as `HasSlices`."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    @property
    def weight(self) -> Tensor:
        """Any tensor of the layer's dtype and device."""
        out = self._layer.found.writes
        return next(self._layer.module.parameters()) if out is None else out.weight  # pyright: ignore[reportReturnType]

    @property
    def slices(self) -> Tensor:
        """A live view of every head's own W_O: (H, e, D)."""
        layer = self._layer
        if layer.found.writes is None:
            raise HeadwiseError(
                f"which part of {layer.found.name} writes is not known for {type(layer.module).__name__}, so its W_O cannot "
                f"be shown; what heads look at can be, and they can be silenced."
            )
        heads = (len(layer.spec.head_ids), layer.spec.value_dim)
        return matrix(layer.found.writes).unflatten(1, heads).permute(1, 2, 0)


class Reads:
    """The q, k and v projections, as live views with a head axis."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def weight(self, letter: str) -> Tensor:
        """(heads, channels, width)"""
        return self._part(letter, "weight")

    def bias(self, letter: str) -> Tensor | None:
        """(heads, channels)"""
        one = self._layer.found.read(0) if self._layer.found.reads is not None else None
        return None if one is None or getattr(one, "bias", None) is None else self._part(letter, "bias")

    def _part(self, letter: str, kind: str) -> Tensor:
        found, spec = self._layer.found, self._layer.spec
        if found.reads is None:
            raise HeadwiseError(
                f"how {type(found.module).__name__} keeps its q, k and v is not known, so {found.name} cannot show them; "
                f"what heads look at can be seen, and they can be silenced."
            )
        layout, place = found.reads[0], "qkv".index(letter)
        heads, keys = len(spec.head_ids), len(spec.kv_ids)
        sizes = [(heads, spec.head_dim), (keys, spec.head_dim), (keys, spec.value_dim)]
        whole = _rows(found.read(place if layout == "apart" else 0), kind)  # (rows, …)
        if layout == "by head":
            return whole.unflatten(0, (heads, 3, spec.head_dim))[:, place]
        if layout == "joined":
            whole = whole.split([a * b for a, b in sizes])[place]
        return whole.unflatten(0, sizes[place])


def matrix(module: nn.Module) -> Tensor:
    """A live view of a projection's weight as (out, in)."""
    return _rows(module, "weight")


def _rows(module: nn.Module, kind: str) -> Tensor:
    value = getattr(module, kind)
    assert isinstance(value, torch.Tensor)
    return value.mT if kind == "weight" and is_turned(module) else value
