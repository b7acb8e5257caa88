"""Addresses of heads and layers, and patterns that select several heads.

The address of a head is `layer.head`, counted from 0: `5.1`. In an encoder-decoder the stack comes first: `enc.5.1`,
`dec.5.1`, `cross.5.1`. In a model with several towers the tower comes first: `vision.5.1`, `text.5.1`, `audio.5.1`.
Addresses never change: if a head is pruned, the other heads of its layer keep their numbers.

Paths and circuits also name other parts of a model, and single inputs of heads:

    18.6        query head 6 of layer 18          18.6.k      its keys, as read by this head only (also .q and .v)
    18.kv2      KV head 2 of layer 18             18.kv2.k    its keys, for all query heads that read them (also .v)
    mlp.18      MLP of layer 18                   embedding, logits     the two ends of the residual stream
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from headwise.errors import ArgumentError

STACKS = ("enc", "dec", "cross", "vision", "text", "audio", "query")

_NUMBERS = r"\*|\d+(?:-\d+)?"
_STACK = rf"(?:((?:{'|'.join(STACKS)})[2-9]?)\.)?"
_PATTERN = re.compile(rf"{_STACK}({_NUMBERS})(?:\.({_NUMBERS}))?")
_KV_PATTERN = re.compile(rf"{_STACK}(\d+)\.kv(\d+)")
_MLP_PATTERN = re.compile(rf"{_STACK}mlp\.(\d+)")
PROJECTIONS = ("q", "k", "v")


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


@dataclass(frozen=True, order=True)
class KVAddress:
    """Address of one KV head: `18.kv2`. In grouped-query attention several query heads read its keys and values.

    Attributes:
        stack: Name of the stack or tower. Empty if the model has only one.
        layer: Index of the layer in its stack, counted from 0.
        kv_head: Original index of the KV head in its layer, counted from 0.

    >>> KVAddress.parse("18.kv2")
    KVAddress(stack='', layer=18, kv_head=2)
    """

    stack: str
    layer: int
    kv_head: int

    def __str__(self) -> str:
        return f"{self.layer_address}.kv{self.kv_head}"

    @property
    def layer_address(self) -> LayerAddress:
        """Address of the layer that the KV head belongs to."""
        return LayerAddress(self.stack, self.layer)

    @staticmethod
    def parse(text: str) -> "KVAddress":
        """Parse `18.kv2` or `cross.18.kv2`."""
        match = _KV_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ArgumentError(
                f"{text!r}: not the address of one KV head. Use layer.kv and its number, for example 18.kv2 or cross.18.kv2."
            )
        return KVAddress(match[1] or "", int(match[2]), int(match[3]))


@dataclass(frozen=True)
class HeadInputAddress:
    """Address of one input of a head: `18.6.k` are the keys as read by query head 6 only.

    `18.kv2.k` are the keys of KV head 2 for all query heads that read them.

    Attributes:
        head: Address of the query head or the KV head.
        projection: "q", "k" or "v".

    >>> str(HeadInputAddress.parse("18.6.k").head), HeadInputAddress.parse("18.kv2.v").head
    ('18.6', KVAddress(stack='', layer=18, kv_head=2))
    """

    head: Address | KVAddress
    projection: str

    def __str__(self) -> str:
        return f"{self.head}.{self.projection}"

    @property
    def layer_address(self) -> LayerAddress:
        """Address of the layer that the head belongs to."""
        return self.head.layer_address

    @staticmethod
    def parse(text: str) -> "HeadInputAddress":
        """Parse `18.6.q`, `18.6.k`, `18.6.v`, `18.kv2.k` or `18.kv2.v`."""
        head_text, _, projection = text.strip().rpartition(".")
        match, kv_match = _PATTERN.fullmatch(head_text), _KV_PATTERN.fullmatch(head_text)
        is_head = match is not None and match[2].isdigit() and (match[3] or "").isdigit()
        if projection not in PROJECTIONS or not (is_head or kv_match):
            raise ArgumentError(
                f"{text!r}: not the address of one input of a head. Use 18.6.q, 18.6.k or 18.6.v for a query head, and "
                f"18.kv2.k or 18.kv2.v for a KV head."
            )
        if kv_match and projection == "q":
            raise ArgumentError(
                f"{text!r}: a KV head has keys and values, but no queries. Use {head_text}.k, {head_text}.v, or the queries "
                f"of a query head, for example {kv_match[2]}.0.q."
            )
        return HeadInputAddress(KVAddress.parse(head_text) if kv_match else Address.parse(head_text), projection)


@dataclass(frozen=True, order=True)
class MLPAddress:
    """Address of the MLP of one layer: `mlp.18`, or `dec.mlp.18` in a model with several stacks.

    Attributes:
        stack: Name of the stack or tower. Empty if the model has only one.
        layer: Index of the layer in its stack, counted from 0.
    """

    stack: str
    layer: int

    def __str__(self) -> str:
        return f"{self.stack}.mlp.{self.layer}" if self.stack else f"mlp.{self.layer}"

    @property
    def layer_address(self) -> LayerAddress:
        """Address of the layer that the MLP belongs to."""
        return LayerAddress(self.stack, self.layer)

    @staticmethod
    def parse(text: str) -> "MLPAddress":
        """Parse `mlp.18` or `dec.mlp.18`."""
        match = _MLP_PATTERN.fullmatch(text.strip())
        if match is None:
            raise ArgumentError(f"{text!r}: not the address of an MLP. Use mlp and its layer, for example mlp.18.")
        return MLPAddress(match[1] or "", int(match[2]))


class EmbeddingOrLogitsAddress(Enum):
    """The two ends of the residual stream: the embedding that starts it and the logits that are read from it."""

    EMBEDDING = "embedding"
    LOGITS = "logits"

    def __str__(self) -> str:
        return self.value


NodeAddress = Address | KVAddress | MLPAddress | EmbeddingOrLogitsAddress


def parse_node(text: str) -> NodeAddress | HeadInputAddress:
    """Parse the address of any part of a model that a path or a circuit can name.

    Args:
        text: `18.6`, `18.kv2`, `18.6.k`, `18.kv2.k`, `mlp.18`, `embedding` or `logits`, with the stack first in a model with
            several stacks: `dec.18.6`.

    Returns:
        The address as an object, whose text is the address again.

    Raises:
        ArgumentError: The text is not the address of one part.

    >>> [type(parse_node(text)).__name__ for text in ("18.6", "18.kv2", "18.6.k", "mlp.18", "logits")]
    ['Address', 'KVAddress', 'HeadInputAddress', 'MLPAddress', 'EmbeddingOrLogitsAddress']
    """
    stripped = text.strip()
    if stripped in {end.value for end in EmbeddingOrLogitsAddress}:
        return EmbeddingOrLogitsAddress(stripped)
    if _KV_PATTERN.fullmatch(stripped):
        return KVAddress.parse(stripped)
    if _MLP_PATTERN.fullmatch(stripped):
        return MLPAddress.parse(stripped)
    if stripped.rpartition(".")[2] in PROJECTIONS:
        return HeadInputAddress.parse(stripped)
    if is_single_head(stripped):
        return Address.parse(stripped)
    raise ArgumentError(
        f"{text!r}: not the address of one part of a model. Use 18.6 (query head), 18.kv2 (KV head), 18.6.k or 18.kv2.k (an "
        f"input of a head: q, k or v), mlp.18, embedding or logits."
    )


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
    if match is None and _names_other_part(part):
        raise ArgumentError(
            f"heads={part!r}: this names a KV head, an input of a head, or a part that is not a head, and query heads are "
            f"needed here. Use layer.head, for example 5.1. Paths and circuits accept this address: hw.patched(path=…)."
        )
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


def _names_other_part(part: str) -> bool:
    """Return True for the address of a part that is not a query head, such as `18.kv2`, `18.6.k` or `mlp.18`."""
    try:
        return not isinstance(parse_node(part), Address)
    except ArgumentError:
        return False


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
