"""The address of a head, and sets of them.

A head lives at `layer.head`, zero-based: `5.1`. Encoder-decoder models name the stack as well: `enc.5.1`, `dec.5.1`,
`cross.5.1`; models of several towers name the tower: `vision.5.1`, `text.5.1`, `audio.5.1`. Numbers are the original ones
for ever: a head that was cut leaves a gap, its neighbours keep their names.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headwise.errors import HeadwiseError

STACKS = ("enc", "dec", "cross", "vision", "text", "audio", "query")

_NUMBERS = r"\*|\d+(?:-\d+)?"
_PATTERN = re.compile(rf"(?:((?:{'|'.join(STACKS)})[2-9]?)\.)?({_NUMBERS})(?:\.({_NUMBERS}))?")


@dataclass(frozen=True, order=True)
class LayerAddress:
    """Where one attention layer stands: `5`, or `cross.5` in a model with several stacks."""

    stack: str
    layer: int

    def __str__(self) -> str:
        return f"{self.stack}.{self.layer}" if self.stack else str(self.layer)

    def head_address(self, number: int) -> "Address":
        """Name one head of this layer.

        >>> str(LayerAddress("cross", 5).head_address(1))
        'cross.5.1'
        """
        return Address(self.stack, self.layer, number)

    @staticmethod
    def parse(text: str) -> "LayerAddress":
        """Read `5` or `cross.5`."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None or match[3] is not None or not match[2].isdigit():
            raise HeadwiseError(f"{text!r} is not the address of a layer; write 5, or enc.5, dec.5, cross.5.")
        return LayerAddress(match[1] or "", int(match[2]))


@dataclass(frozen=True, order=True)
class Address:
    """Where one head lives. Sorts by stack, layer, head.

    >>> Address.parse("5.1")
    Address(stack='', layer=5, head=1)
    >>> str(Address.parse("cross.5.1"))
    'cross.5.1'
    """

    stack: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.layer_address}.{self.head}"

    @property
    def layer_address(self) -> LayerAddress:
        """The layer this head belongs to."""
        return LayerAddress(self.stack, self.layer)

    @staticmethod
    def parse(text: str) -> "Address":
        """Read one address; patterns such as `5.*` are for `select`."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None or not match[2].isdigit() or not (match[3] or "").isdigit():
            raise HeadwiseError(f"{text!r} is not the address of one head; write layer.head, e.g. 5.1 or cross.5.1.")
        return Address(match[1] or "", int(match[2]), int(match[3]))


def select(pattern: "str | Address | Iterable[Address | str]", available: Iterable[Address]) -> tuple[Address, ...]:
    """The heads a pattern names, in the order of `available`.

    >>> two_by_two = [Address("", layer, head) for layer in range(2) for head in range(2)]
    >>> [str(a) for a in select("0.1, 1.*", two_by_two)]
    ['0.1', '1.0', '1.1']
    """
    available = tuple(available)
    if isinstance(pattern, Address):
        selected = {pattern}
    elif isinstance(pattern, str):
        selected = {address for part in pattern.split(",") for address in _match_pattern(part.strip(), available)}
    else:
        selected = {Address.parse(item) if isinstance(item, str) else item for item in pattern}
        for item in selected:
            if not isinstance(item, Address):
                raise HeadwiseError(f"{item!r} is not the address of a head; write layer.head as a text, e.g. '5.1'.")
    for address in sorted(selected - set(available)):
        raise HeadwiseError(f"there is no head {address} here; {_describe_heads(available)}")
    return tuple(address for address in available if address in selected)


def is_single_head(pattern: object) -> bool:
    """Whether a pattern is written as exactly one head: `5.1` is, `5.*` and `5.1,5.2` are not."""
    if isinstance(pattern, Address):
        return True
    match = _PATTERN.fullmatch(pattern.strip()) if isinstance(pattern, str) else None
    return match is not None and match[2].isdigit() and (match[3] or "").isdigit()


def _match_pattern(part: str, available: tuple[Address, ...]) -> list[Address]:
    match = _PATTERN.fullmatch(part)
    if match is None:
        raise HeadwiseError(f"{part!r} does not name heads; write 5.1, 5.*, 0-3.*, or several with commas: 5.1,6.9.")
    stack, layers, heads = match[1] or "", match[2], match[3]
    if heads is None and layers == "*":
        heads = "*"  # simply all
    if heads is None:
        raise HeadwiseError(
            f"{part!r} names a layer, not heads; write {part}.* for all its heads, or {part}.1 for one."
        )
    matching = [a for a in available if a.stack == stack and _covers(layers, a.layer) and _covers(heads, a.head)]
    if matching:
        return matching
    if not stack and available and all(a.stack for a in available):
        stacks = ", ".join(sorted({a.stack for a in available}))
        raise HeadwiseError(
            f"{part!r} does not say which stack; this model has {stacks}: write {available[0].stack}.{part}."
        )
    raise HeadwiseError(f"{part!r} names no head here; {_describe_heads(available)}")


def _covers(pattern: str, value: int) -> bool:
    if pattern == "*":
        return True
    first, _, last = pattern.partition("-")
    return int(first) <= value <= int(last or first)


def _describe_heads(available: tuple[Address, ...]) -> str:
    """What there is: layers with the same heads are told together."""
    heads_by_layer: dict[LayerAddress, list[int]] = {}
    for address in available:
        heads_by_layer.setdefault(address.layer_address, []).append(address.head)
    layers_by_heads: dict[str, list[LayerAddress]] = {}
    for layer_address, heads in heads_by_layer.items():
        is_contiguous = heads == list(range(len(heads)))
        text = f"0-{len(heads) - 1}" if is_contiguous and len(heads) > 1 else ",".join(map(str, heads))
        layers_by_heads.setdefault(text, []).append(layer_address)
    descriptions = [
        f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} {'have' if len(layers) > 1 else 'has'} heads {heads}"
        for heads, layers in layers_by_heads.items()
    ]
    return "; ".join(descriptions) + "." if descriptions else "there are no heads at all."
