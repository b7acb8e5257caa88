"""At how many bits weights are stored: by head and part. Frozen data, no torch.

A head has four matrices. Its queries and keys make one pair (qk), its values and what it writes the other (vo); keys and
values may be shared by several heads, and then have the most bits that any of these asks for. Beside the heads there are
the MLPs and the vocabulary, which is the embedding too where the two are tied.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headwise.errors import HeadwiseError
from headwise.spec.address import Address, SiteAddress, select

if TYPE_CHECKING:
    from headwise.spec.attention import AttentionSpec

WEIGHT_BITS = (16, 8, 4, 3, 2)  # at 16 a number is a 16-bit float and needs no scale
FULL = 32  # numbers as the model computes them
GROUP = 32  # numbers along the input that share a scale
PAIRS = ("qk", "vo")
BESIDE = ("mlp", "vocabulary")

Bits = (
    int | Mapping[str, int]
)  # one number for everything, or by head and part: {"*": 8, "5.1": 4, "5.2:qk": 3, "mlp": 8}


@dataclass(frozen=True)
class WeightRule:
    """Weights of one part that are stored alike: q and o of heads, k and v of key heads, the MLPs, the vocabulary.

    >>> str(WeightRule("q", 4, ("5.1", "5.2")))
    'W_Q of 5.1 5.2: 4 bits in groups of 32'
    """

    part: str  # q, k, v, o, mlp or vocabulary
    bits: int
    heads: tuple[str, ...] = ()  # by address; of k and v by the number among the key heads of the layer
    group: int = GROUP

    def __post_init__(self) -> None:
        if self.part not in (*"qkvo", *BESIDE):
            raise HeadwiseError(f"weights have the parts q, k, v, o, mlp and vocabulary; got {self.part!r}.")
        check_bits(self.bits)
        check_group(self.group)
        if bool(self.heads) == (self.part in BESIDE):
            raise HeadwiseError(
                f"a rule for {self.part} names {'no heads' if self.heads else 'heads'}; got {self.heads}."
            )

    def __str__(self) -> str:
        what = self.part if self.part in BESIDE else f"W_{self.part.upper()} of {' '.join(self.heads)}"
        return f"{what}: {self.bits} bits in groups of {self.group}"


@dataclass(frozen=True)
class LayerBits:
    """The bits of each head an attention layer was born with, by letter, of k and v by key head; 32: as it is."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    o: tuple[int, ...]
    group: int = GROUP
    activations: int = FULL  # what is multiplied by such weights is rounded to so many bits, row by row


def check_bits(bits: object) -> None:
    """Weights are stored at bits that somebody has."""
    if type(bits) is not int or bits not in WEIGHT_BITS:
        told = ", ".join(map(str, WEIGHT_BITS[:-1]))
        raise HeadwiseError(f"weights are stored at {told} or {WEIGHT_BITS[-1]} bits; got {bits!r}.")


def check_group(group: object) -> None:
    """A group is some numbers that share a scale."""
    if type(group) is not int or group < 1:
        raise HeadwiseError(f"group counts the numbers that share a scale, 1 or more; got {group!r}.")


def row_bytes(numbers: int, bits: int, group: int = GROUP, element: int = 4) -> int:
    """What a row takes, packed, with a scale of 4 bytes for each group; at 32 bits it is as it is, `element` bytes a number.

    >>> row_bytes(576, 4), row_bytes(576, 3), row_bytes(576, 32)  # 288 + 72, 216 + 72, 2304
    (360, 288, 2304)
    """
    if bits in (FULL, 16):
        return numbers * (element if bits == FULL else 2)
    return math.ceil(numbers * bits / 8) + 4 * math.ceil(numbers / max(1, min(group, numbers)))


def row_saving(numbers: int, bits: int, group: int, element: int) -> int:
    """How many bytes a row is shorter than as it is computed."""
    return numbers * element - row_bytes(numbers, bits, group, element)


def saved_bytes(layers: Mapping[SiteAddress, "AttentionSpec"], element: int) -> int:
    """The same over all heads of a model."""
    saved = 0
    for layer in layers.values():
        if layer.weights is None:
            continue
        share, group = layer.heads if layer.input == "slice" else 1, layer.weights.group
        for letter, there, rows, numbers in (
            ("q", layer.head_ids, layer.head_dim, layer.width // share),
            ("k", layer.kv_ids, layer.head_dim, layer.kv_width // share),
            ("v", layer.kv_ids, layer.value_dim, layer.kv_width // share),
            ("o", layer.head_ids, layer.width, layer.value_dim),
        ):
            bits = getattr(layer.weights, letter)
            saved += sum(rows * row_saving(numbers, bits[number], group, element) for number in there)
    return saved


def weight_rules(
    given: Bits, layers: Mapping[SiteAddress, "AttentionSpec"], group: int = GROUP
) -> tuple[WeightRule, ...]:
    """Rules for what a person asks: one number, or numbers by pattern, of which the later counts where two name the same.

    A pattern of heads may end in :qk or :vo. 32 leaves a part as it is.
    """
    check_group(group)
    if not isinstance(given, Mapping):
        given = {"*": given, "mlp": given, "vocabulary": given}
    heads = tuple(site.head(number) for site, layer in layers.items() for number in layer.head_ids)
    chosen: dict[tuple[str, Address], int] = {}
    beside: dict[str, int] = {}
    for pattern, bits in given.items():
        if not (type(bits) is int and bits == FULL):
            check_bits(bits)
        if pattern in BESIDE:
            beside[pattern] = bits
            continue
        where, pairs = _parsed(pattern)
        named = heads if where == "*" else select(where, heads)
        chosen |= {(pair, head): bits for pair in pairs for head in named}
    made = [WeightRule(part, bits, (), group) for part, bits in beside.items() if bits != FULL]
    for pair in PAIRS:
        own = {head: chosen.get((pair, head), FULL) for head in heads}
        shared = _most_bits(own, layers)
        one, other = (shared, own) if pair == "vo" else (own, shared)
        made += [*_ruled(pair[0], one, group), *_ruled(pair[1], other, group)]
    return tuple(made)


def for_those_left(given: Bits, heads: tuple[Address, ...], gone: Iterable[Address]) -> Bits:
    """What is asked of all heads, asked of those that stay: patterns that name heads which go name them no more."""
    if not isinstance(given, Mapping):
        return given
    away, made = set(gone), {}
    for pattern, bits in given.items():
        if pattern in BESIDE:
            made[pattern] = bits
            continue
        where, pairs = _parsed(pattern)
        left = [str(head) for head in (heads if where == "*" else select(where, heads)) if head not in away]
        if left:
            made[",".join(left) + (f":{pairs[0]}" if len(pairs) == 1 else "")] = bits
    return made


def weight_lines(rules: Iterable[WeightRule]) -> list[str]:
    """A line for each part."""
    by_part: dict[str, list[WeightRule]] = {}
    for rule in rules:
        by_part.setdefault(rule.part, []).append(rule)
    group = next(rule.group for some in by_part.values() for rule in some)
    lines = [f"Weights are stored at few bits, in groups of {group}."]
    for part, some in by_part.items():
        if part in BESIDE:
            lines.append(f"  {part}: {some[0].bits} bits")
        else:
            told = ", ".join(f"{len(rule.heads)} at {rule.bits} bits" for rule in some)
            lines.append(f"  W_{part.upper()}: {told}")
    return lines


def _parsed(pattern: object) -> tuple[str, tuple[str, ...]]:
    if not isinstance(pattern, str):
        raise HeadwiseError(f"weights are named by head and part: '*', '5.1', '5.1:qk', 'mlp'; got {pattern!r}.")
    where, _, pair = pattern.partition(":")
    if pair and pair not in PAIRS:
        raise HeadwiseError(f"a head has the pairs qk and vo: '5.1:qk'; got {pattern!r}.")
    where = where.strip()
    if where.isalpha() and where not in BESIDE:
        raise HeadwiseError(f"weights beside those of heads are {' and '.join(BESIDE)}; got {where!r}.")
    return where, (pair,) if pair else PAIRS


def _most_bits(own: Mapping[Address, int], layers: Mapping[SiteAddress, "AttentionSpec"]) -> dict[Address, int]:
    """Of each key head, the most bits among the heads that read it."""
    shared: dict[Address, int] = {}
    for site, layer in layers.items():
        for number, key in zip(layer.head_ids, layer.kv_of_head, strict=True):
            head = site.head(layer.kv_ids[key])
            shared[head] = max(shared.get(head, 0), own[site.head(number)])
    return shared


def _ruled(part: str, bits: Mapping[Address, int], group: int) -> list[WeightRule]:
    """One rule for each number of bits; what is left as it is is not told."""
    by_bits: dict[int, list[str]] = {}
    for head, count in bits.items():
        if count != FULL:
            by_bits.setdefault(count, []).append(str(head))
    return [WeightRule(part, count, tuple(heads), group) for count, heads in sorted(by_bits.items(), reverse=True)]


def rules_left(rules: Iterable[WeightRule], heads: set[str], keys: set[str]) -> tuple[WeightRule, ...]:
    """The rules of a model of which these heads, and these key heads, are left."""
    made = []
    for rule in rules:
        there = tuple(head for head in rule.heads if head in (heads if rule.part in "qo" else keys))
        if there or not rule.heads:
            made.append(replace(rule, heads=there))
    return tuple(made)


def layer_bits(
    rules: Iterable[WeightRule], layers: Mapping[SiteAddress, "AttentionSpec"], activations: int
) -> dict[SiteAddress, LayerBits]:
    """The same by layer; a rule for what is not there, or two for the same, are refused."""
    rules = tuple(rules)
    found: dict[tuple[str, Address], int] = {}
    beside: list[str] = []
    for rule in rules:
        if not isinstance(rule, WeightRule):
            raise HeadwiseError(f"weights of a spec are WeightRules, as spec.quantised(4) makes them; got {rule!r}.")
        beside += [] if rule.heads else [rule.part]
        for head in map(Address.parse, rule.heads):
            layer = layers.get(head.site)
            there = () if layer is None else layer.head_ids if rule.part in "qo" else layer.kv_ids
            if head.head not in there or (rule.part, head) in found:
                why = "is named twice" if (rule.part, head) in found else "is not there"
                raise HeadwiseError(f"bits of W_{rule.part.upper()}: head {head} {why}; quantise the model anew.")
            found[rule.part, head] = rule.bits
    groups = {rule.group for rule in rules}
    if len(groups) > 1 or len(set(beside)) < len(beside):
        raise HeadwiseError("rules for weights name each part once and share one group; quantise the model anew.")
    made: dict[SiteAddress, LayerBits] = {}
    for site in dict.fromkeys(head.site for _, head in found):
        layer, group = layers[site], next(iter(groups))
        by = {
            part: tuple(found.get((part, site.head(n)), FULL) for n in range(count))
            for part, count in zip("qkvo", (layer.heads, layer.kv_heads, layer.kv_heads, layer.heads), strict=True)
        }
        made[site] = LayerBits(**by, group=group, activations=activations)
    return made
