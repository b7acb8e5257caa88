"""Addresses of heads and layers, and patterns that select several heads.

The address of a head is `layer.head`, counted from 0: `5.1`. In an encoder-decoder the stack comes first: `enc.5.1`,
`dec.5.1`, `cross.5.1`. In a model with several towers the tower comes first: `vision.5.1`, `text.5.1`, `audio.5.1`.
Addresses never change: if a head is pruned, the other heads of its layer keep their numbers.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headwise.errors import ArgumentError

STACKS = ("enc", "dec", "cross", "vision", "text", "audio", "query")

_NUMBERS = r"\*|\d+(?:-\d+)?"
_PATTERN = re.compile(rf"(?:((?:{'|'.join(STACKS)})[2-9]?)\.)?({_NUMBERS})(?:\.({_NUMBERS}))?")


@dataclass(frozen=True, order=True)
class LayerAddress:
    """Address of one attention layer: `5`, or `cross.5` in a model with several stacks.

    Attributes:
        stack: Name of the stack or tower, such as "enc" or "vision". Empty if the model has only one.
        layer: Index of the layer in its stack, counted from 0.
    """

    stack: str
    layer: int

    def __str__(self) -> str:
        return f"{self.stack}.{self.layer}" if self.stack else str(self.layer)

    def head_address(self, number: int) -> "Address":
        """Return the address of one head of this layer.

        >>> str(LayerAddress("cross", 5).head_address(1))
        'cross.5.1'
        """
        return Address(self.stack, self.layer, number)

    @staticmethod
    def parse(text: str) -> "LayerAddress":
        """Parse `5` or `cross.5`."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None or match[3] is not None or not match[2].isdigit():
            raise ArgumentError(f"{text!r}: not the address of a layer. Use 5, enc.5, dec.5 or cross.5.")
        return LayerAddress(match[1] or "", int(match[2]))


@dataclass(frozen=True, order=True)
class Address:
    """Address of one head. Addresses sort by stack, layer and head.

    Attributes:
        stack: Name of the stack or tower, such as "enc" or "vision". Empty if the model has only one.
        layer: Index of the layer in its stack, counted from 0.
        head: Original index of the head in its layer, counted from 0.

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
        """Address of the layer that the head belongs to."""
        return LayerAddress(self.stack, self.layer)

    @staticmethod
    def parse(text: str) -> "Address":
        """Parse the address of one head.

        Args:
            text: An address such as `5.1` or `cross.5.1`. Patterns such as `5.*` are not accepted.

        Returns:
            The address.

        Raises:
            ArgumentError: The text is not the address of one head.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None or not match[2].isdigit() or not (match[3] or "").isdigit():
            raise ArgumentError(f"{text!r}: not the address of one head. Use layer.head, for example 5.1 or cross.5.1.")
        return Address(match[1] or "", int(match[2]), int(match[3]))


def select(pattern: "str | Address | Iterable[Address | str]", available: Iterable[Address]) -> tuple[Address, ...]:
    """Return the heads that a pattern selects, in the order of `available`.

    Args:
        pattern: One address, several addresses, or a text such as `5.1`, `5.*`, `0-3.*` or `5.1,6.9`.
        available: Addresses of all heads of the model.

    Raises:
        ArgumentError: The pattern is invalid, or it selects a head that is not available.

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
                raise ArgumentError(
                    f"heads: {item!r} is not the address of a head. Use layer.head as a string, for example '5.1'."
                )
    for address in sorted(selected - set(available)):
        raise ArgumentError(f"heads: the model does not have head {address}. {_describe_heads(available)}")
    return tuple(address for address in available if address in selected)


def is_single_head(pattern: object) -> bool:
    """Return True if a pattern is the address of exactly one head: True for `5.1`, False for `5.*` and `5.1,5.2`."""
    if isinstance(pattern, Address):
        return True
    match = _PATTERN.fullmatch(pattern.strip()) if isinstance(pattern, str) else None
    return match is not None and match[2].isdigit() and (match[3] or "").isdigit()


def _match_pattern(part: str, available: tuple[Address, ...]) -> list[Address]:
    match = _PATTERN.fullmatch(part)
    if match is None:
        raise ArgumentError(
            f"heads={part!r}: not a valid head pattern. Use 5.1, 5.*, 0-3.*, or several separated by commas: 5.1,6.9."
        )
    stack, layers, heads = match[1] or "", match[2], match[3]
    if heads is None and layers == "*":
        heads = "*"  # the pattern "*" selects all heads
    if heads is None:
        raise ArgumentError(
            f"heads={part!r}: this selects a layer, not heads. Use '{part}.*' for all its heads or '{part}.1' for one."
        )
    matching = [a for a in available if a.stack == stack and _covers(layers, a.layer) and _covers(heads, a.head)]
    if matching:
        return matching
    if not stack and available and all(a.stack for a in available):
        stacks = ", ".join(sorted({a.stack for a in available}))
        raise ArgumentError(
            f"heads={part!r}: this pattern does not name a stack. This model has the stacks {stacks}. "
            f"Put the stack first, for example '{available[0].stack}.{part}'."
        )
    raise ArgumentError(f"heads={part!r}: the model has no such head. {_describe_heads(available)}")


def _covers(pattern: str, value: int) -> bool:
    if pattern == "*":
        return True
    first, _, last = pattern.partition("-")
    return int(first) <= value <= int(last or first)


def _describe_heads(available: tuple[Address, ...]) -> str:
    """Describe the available heads in one sentence. Layers with equal head numbers are grouped."""
    heads_by_layer: dict[LayerAddress, list[int]] = {}
    for address in available:
        heads_by_layer.setdefault(address.layer_address, []).append(address.head)
    layers_by_heads: dict[str, list[LayerAddress]] = {}
    for layer_address, heads in heads_by_layer.items():
        is_contiguous = heads == list(range(len(heads)))
        text = f"0-{len(heads) - 1}" if is_contiguous and len(heads) > 1 else ",".join(map(str, heads))
        layers_by_heads.setdefault(text, []).append(layer_address)
    descriptions = [
        f"{'Layers' if len(layers) > 1 else 'Layer'} {', '.join(map(str, layers))} "
        f"{'have' if len(layers) > 1 else 'has'} heads {heads}"
        for heads, layers in layers_by_heads.items()
    ]
    return ". ".join(descriptions) + "." if descriptions else "The model has no heads."
