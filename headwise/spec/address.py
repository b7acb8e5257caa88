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
class SiteAddress:
    """Where one attention layer stands: `5`, or `cross.5` in a model with several stacks."""

    stack: str
    layer: int

    def __str__(self) -> str:
        return f"{self.stack}.{self.layer}" if self.stack else str(self.layer)

    def head(self, number: int) -> "Address":
        """Name one head of this layer.

        >>> str(SiteAddress("cross", 5).head(1))
        'cross.5.1'
        """
        return Address(self.stack, self.layer, number)

    @staticmethod
    def parse(text: str) -> "SiteAddress":
        """Read `5` or `cross.5`."""
        found = _PATTERN.fullmatch(text.strip())
        if found is None or found[3] is not None or not found[2].isdigit():
            raise HeadwiseError(f"{text!r} is not the address of a layer; write 5, or enc.5, dec.5, cross.5.")
        return SiteAddress(found[1] or "", int(found[2]))


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
        return f"{self.site}.{self.head}"

    @property
    def site(self) -> SiteAddress:
        """The layer this head belongs to."""
        return SiteAddress(self.stack, self.layer)

    @staticmethod
    def parse(text: str) -> "Address":
        """Read one address; patterns such as `5.*` are for `select`."""
        found = _PATTERN.fullmatch(text.strip())
        if found is None or not found[2].isdigit() or not (found[3] or "").isdigit():
            raise HeadwiseError(f"{text!r} is not the address of one head; write layer.head, e.g. 5.1 or cross.5.1.")
        return Address(found[1] or "", int(found[2]), int(found[3]))


def select(pattern: "str | Address | Iterable[Address | str]", among: Iterable[Address]) -> tuple[Address, ...]:
    """The heads a pattern names, in the order of `among`.

    >>> two_by_two = [Address("", layer, head) for layer in range(2) for head in range(2)]
    >>> [str(a) for a in select("0.1, 1.*", two_by_two)]
    ['0.1', '1.0', '1.1']
    """
    among = tuple(among)
    if isinstance(pattern, Address):
        wanted = {pattern}
    elif isinstance(pattern, str):
        wanted = {address for part in pattern.split(",") for address in _match(part.strip(), among)}
    else:
        wanted = {Address.parse(item) if isinstance(item, str) else item for item in pattern}
        for item in wanted:
            if not isinstance(item, Address):
                raise HeadwiseError(f"{item!r} is not the address of a head; write layer.head as a text, e.g. '5.1'.")
    for address in sorted(wanted - set(among)):
        raise HeadwiseError(f"there is no head {address} here; {_range(among)}")
    return tuple(address for address in among if address in wanted)


def is_single(pattern: object) -> bool:
    """Whether a pattern is written as exactly one head: `5.1` is, `5.*` and `5.1,5.2` are not."""
    if isinstance(pattern, Address):
        return True
    found = _PATTERN.fullmatch(pattern.strip()) if isinstance(pattern, str) else None
    return found is not None and found[2].isdigit() and (found[3] or "").isdigit()


def _match(part: str, among: tuple[Address, ...]) -> list[Address]:
    found = _PATTERN.fullmatch(part)
    if found is None:
        raise HeadwiseError(f"{part!r} does not name heads; write 5.1, 5.*, 0-3.*, or several with commas: 5.1,6.9.")
    stack, layers, heads = found[1] or "", found[2], found[3]
    if heads is None and layers == "*":
        heads = "*"  # simply all
    if heads is None:
        raise HeadwiseError(
            f"{part!r} names a layer, not heads; write {part}.* for all its heads, or {part}.1 for one."
        )
    hits = [a for a in among if a.stack == stack and _covers(layers, a.layer) and _covers(heads, a.head)]
    if hits:
        return hits
    if not stack and among and all(a.stack for a in among):
        stacks = ", ".join(sorted({a.stack for a in among}))
        raise HeadwiseError(
            f"{part!r} does not say which stack; this model has {stacks}: write {among[0].stack}.{part}."
        )
    raise HeadwiseError(f"{part!r} names no head here; {_range(among)}")


def _covers(numbers: str, value: int) -> bool:
    if numbers == "*":
        return True
    first, _, last = numbers.partition("-")
    return int(first) <= value <= int(last or first)


def _range(among: tuple[Address, ...]) -> str:
    """What there is: layers with the same heads are told together."""
    by_site: dict[SiteAddress, list[int]] = {}
    for address in among:
        by_site.setdefault(address.site, []).append(address.head)
    by_heads: dict[str, list[SiteAddress]] = {}
    for site, heads in by_site.items():
        whole = heads == list(range(len(heads)))
        text = f"0-{len(heads) - 1}" if whole and len(heads) > 1 else ",".join(map(str, heads))
        by_heads.setdefault(text, []).append(site)
    told = [
        f"layer{'s' * (len(sites) > 1)} {', '.join(map(str, sites))} {'have' if len(sites) > 1 else 'has'} heads {heads}"
        for heads, sites in by_heads.items()
    ]
    return "; ".join(told) + "." if told else "there are no heads at all."
