"""What the cache of a key head keeps: every token or a few, at how many bits. Frozen data, no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headwise.errors import HeadwiseError
from headwise.spec.address import Address, select
from headwise.spec.weight_bits import GROUP, row_bytes

BITS = (32, 16, 8, 4)  # 32: numbers as the model computes them


@dataclass(frozen=True)
class Keeps:
    """What one key head remembers. With `last`, it streams: the `first` tokens of the text and the `last` ones, itself among
    them, are all a query sees (https://arxiv.org/abs/2309.17453). Fewer bits: keys and values are rounded as they come in.

    >>> str(Keeps(first=4, last=128)), str(Keeps(bits=8)), str(Keeps())
    ('streaming 4 + 128', '8 bits', 'everything')
    """

    bits: int = 32
    first: int = 0
    last: int | None = None  # None: every token

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise HeadwiseError(f"a cache holds numbers at {', '.join(map(str, BITS))} bits; got {self.bits!r}.")
        for name, value, least in (("first", self.first, 0), ("last", self.last, 1)):
            if value is not None and (type(value) is not int or value < least):
                raise HeadwiseError(f"{name} counts tokens, {least} or more; got {value!r}.")
        if self.last is None and self.first:
            raise HeadwiseError(
                f"a head that keeps its first {self.first} tokens also needs last=…, how many it ends with."
            )

    @property
    def streams(self) -> bool:
        """Whether tokens are forgotten."""
        return self.last is not None

    def tokens(self, length: int) -> int:
        """How many of so many tokens are held."""
        return length if self.last is None else min(length, self.first + self.last)

    def __str__(self) -> str:
        told = [f"streaming {self.first} + {self.last}"] if self.streams else []
        told += [f"{self.bits} bits"] if self.bits != 32 else []
        return ", ".join(told) or "everything"


ALL = Keeps()


@dataclass(frozen=True)
class CacheRule:
    """Key heads that keep alike, by address."""

    heads: tuple[str, ...]
    keeps: Keeps


Treatments = Mapping[str, Keeps | int] | Iterable[CacheRule]


def cache_rules(given: Treatments, key_heads: tuple[Address, ...]) -> tuple[CacheRule, ...]:
    """One rule for each way of keeping, heads in their order; those that keep everything are not told.

    A mapping names key heads by pattern, {"5.*": Keeps(first=4, last=128), "0.1": 8}, a number being bits; of two patterns
    that name the same head the later one counts.
    """
    if isinstance(given, Mapping):
        told: list[tuple[str, Keeps | int]] = list(given.items())  # pyright: ignore[reportAssignmentType]
    else:
        rules = tuple(given)
        if not all(isinstance(rule, CacheRule) for rule in rules):
            raise HeadwiseError(f"a cache is told as {{'5.1': Keeps(first=4, last=128)}}; got {rules!r}.")
        told = [(",".join(rule.heads), rule.keeps) for rule in rules if rule.heads]
    chosen: dict[Address, Keeps] = {}
    for pattern, keeps in told:
        keeps = Keeps(bits=keeps) if isinstance(keeps, int) else keeps
        if not isinstance(keeps, Keeps):
            raise HeadwiseError(f"a key head keeps Keeps(first=4, last=128), or a number of bits; got {keeps!r}.")
        chosen |= dict.fromkeys(select(pattern, key_heads), keeps)
    by_keeps: dict[Keeps, list[str]] = {}
    for head in key_heads:
        if chosen.get(head, ALL) != ALL:
            by_keeps.setdefault(chosen[head], []).append(str(head))
    return tuple(CacheRule(tuple(heads), keeps) for keeps, heads in by_keeps.items())


def bytes_of_a_row(d: int, bits: int, element: int = 4) -> int:
    """What d channels take, their scales among it; at 32 bits they are kept as they are, `element` bytes each."""
    scales = 4 * -(-d // min(GROUP, d)) if bits == 16 else 0  # those of weights have none at 16 bits
    return row_bytes(d, bits, GROUP, element) + scales
