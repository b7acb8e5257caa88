"""At how many bits weights are stored: by head and part. Frozen data, no torch.

A head has four matrices. Its queries and keys make one pair (qk), its values and what it writes the other (vo); keys and
values may be shared by several heads, and then have the most bits that any of these asks for. Beside the heads there are
the MLPs and the vocabulary, which is the embedding too where the two are tied.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from headwise.errors import HeadwiseError, suggest_names
from headwise.spec.address import Address, LayerAddress, select

if TYPE_CHECKING:
    from headwise.spec.attention import AttentionSpec

WEIGHT_BITS = (16, 8, 4, 3, 2)  # at 16 a number is a 16-bit float and needs no scale
FULL_PRECISION = 32  # numbers as the model computes them
GROUP_SIZE = 32  # numbers along the input that share a scale
PROJECTION_PAIRS = ("qk", "vo")
NON_HEAD_PARTS = ("mlp", "vocabulary")

Basis = Literal["given", "balanced", "random"]  # of heads, in which their weights are quantized
BASES = ("given", "balanced", "random")

# one number for everything, or by head and part: {"*": 8, "5.1": 4, "5.2:qk": 3, "mlp": 8}
BitAllocation = int | Mapping[str, int]


@dataclass(frozen=True)
class WeightRule:
    """Weights of one part that are stored alike: q and o of heads, k and v of key heads, the MLPs, the vocabulary.

    >>> str(WeightRule("q", 4, ("5.1", "5.2")))
    'W_Q of 5.1 5.2: 4 bits in groups of 32'
    """

    part: str  # q, k, v, o, mlp or vocabulary
    bits: int
    heads: tuple[str, ...] = ()  # by address; of k and v by the number among the key heads of the layer
    group_size: int = GROUP_SIZE

    def __post_init__(self) -> None:
        if self.part not in (*"qkvo", *NON_HEAD_PARTS):
            raise HeadwiseError(f"weights have the parts q, k, v, o, mlp and vocabulary; got {self.part!r}.")
        check_bits(self.bits)
        check_group_size(self.group_size)
        if bool(self.heads) == (self.part in NON_HEAD_PARTS):
            raise HeadwiseError(
                f"a rule for {self.part} names {'no heads' if self.heads else 'heads'}; got {self.heads}."
            )

    def __str__(self) -> str:
        name = self.part if self.part in NON_HEAD_PARTS else f"W_{self.part.upper()} of {' '.join(self.heads)}"
        return f"{name}: {self.bits} bits in groups of {self.group_size}"


@dataclass(frozen=True)
class LayerBits:
    """The bits of each head an attention layer was born with, by letter, of k and v by key head; 32: as it is."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    o: tuple[int, ...]
    group_size: int = GROUP_SIZE
    activation_bits: int = FULL_PRECISION  # what is multiplied by such weights is rounded to so many bits, row by row


def check_bits(bits: object) -> None:
    """Weights are stored at bits that somebody has."""
    if type(bits) is not int or bits not in WEIGHT_BITS:
        allowed = ", ".join(map(str, WEIGHT_BITS[:-1]))
        raise HeadwiseError(f"weights are stored at {allowed} or {WEIGHT_BITS[-1]} bits; got {bits!r}.")


def check_group_size(group_size: object) -> None:
    """A group is some numbers that share a scale."""
    if type(group_size) is not int or group_size < 1:
        raise HeadwiseError(f"group_size counts the numbers that share a scale, 1 or more; got {group_size!r}.")


def check_basis(basis: str) -> None:
    """Raise if a basis has an unknown name."""
    if basis not in BASES:
        raise HeadwiseError(f"there is no basis {basis!r}; {suggest_names(str(basis), BASES)}")


def row_bytes(elements: int, bits: int, group_size: int = GROUP_SIZE, element_bytes: int = 4) -> int:
    """What a row takes, packed, with a scale of 4 bytes for each group; at 32 bits it is as it is, `element_bytes` a number.

    >>> row_bytes(576, 4), row_bytes(576, 3), row_bytes(576, 32)  # 288 + 72, 216 + 72, 2304
    (360, 288, 2304)
    """
    if bits in (FULL_PRECISION, 16):
        return elements * (element_bytes if bits == FULL_PRECISION else 2)
    return math.ceil(elements * bits / 8) + 4 * math.ceil(elements / max(1, min(group_size, elements)))


def row_bytes_saved(elements: int, bits: int, group_size: int, element_bytes: int) -> int:
    """How many bytes a row is shorter than as it is computed."""
    return elements * element_bytes - row_bytes(elements, bits, group_size, element_bytes)


def total_head_bytes_saved(layers: Mapping[LayerAddress, "AttentionSpec"], element_bytes: int) -> int:
    """The same over all heads of a model."""
    saved = 0
    for layer in layers.values():
        if layer.weight_bits is None:
            continue
        input_slices, group_size = layer.heads if layer.head_input == "slice" else 1, layer.weight_bits.group_size
        for projection, present_ids, rows, elements in (
            ("q", layer.head_ids, layer.head_dim, layer.width // input_slices),
            ("k", layer.kv_head_ids, layer.head_dim, layer.kv_width // input_slices),
            ("v", layer.kv_head_ids, layer.value_dim, layer.kv_width // input_slices),
            ("o", layer.head_ids, layer.width, layer.value_dim),
        ):
            bits = getattr(layer.weight_bits, projection)
            saved += sum(
                rows * row_bytes_saved(elements, bits[head_id], group_size, element_bytes) for head_id in present_ids
            )
    return saved


def rules_from_allocation(
    allocation: BitAllocation, layers: Mapping[LayerAddress, "AttentionSpec"], group_size: int = GROUP_SIZE
) -> tuple[WeightRule, ...]:
    """Rules for what a person asks: one number, or numbers by pattern, of which the later counts where two name the same.

    A pattern of heads may end in :qk or :vo. 32 leaves a part as it is.
    """
    check_group_size(group_size)
    if not isinstance(allocation, Mapping):
        allocation = {"*": allocation, "mlp": allocation, "vocabulary": allocation}
    heads = tuple(
        layer_address.head_address(number) for layer_address, layer in layers.items() for number in layer.head_ids
    )
    bits_of_pair: dict[tuple[str, Address], int] = {}
    non_head_bits: dict[str, int] = {}
    for pattern, bits in allocation.items():
        if not (type(bits) is int and bits == FULL_PRECISION):
            check_bits(bits)
        if pattern in NON_HEAD_PARTS:
            non_head_bits[pattern] = bits
            continue
        head_pattern, pairs = _parse_pattern(pattern)
        selected = heads if head_pattern == "*" else select(head_pattern, heads)
        bits_of_pair |= {(pair, head): bits for pair in pairs for head in selected}
    rules = [WeightRule(part, bits, (), group_size) for part, bits in non_head_bits.items() if bits != FULL_PRECISION]
    for pair in PROJECTION_PAIRS:
        head_bits = {head: bits_of_pair.get((pair, head), FULL_PRECISION) for head in heads}
        kv_bits = _max_bits_per_kv_head(head_bits, layers)
        first_bits, second_bits = (kv_bits, head_bits) if pair == "vo" else (head_bits, kv_bits)
        rules += [*_rules_for_part(pair[0], first_bits, group_size), *_rules_for_part(pair[1], second_bits, group_size)]
    return tuple(rules)


def drop_pruned_heads(
    allocation: BitAllocation, heads: tuple[Address, ...], pruned: Iterable[Address]
) -> BitAllocation:
    """What is asked of all heads, asked of those that stay: patterns that name heads which go name them no more."""
    if not isinstance(allocation, Mapping):
        return allocation
    pruned_set, remaining = set(pruned), {}
    for pattern, bits in allocation.items():
        if pattern in NON_HEAD_PARTS:
            remaining[pattern] = bits
            continue
        head_pattern, pairs = _parse_pattern(pattern)
        kept_names = [
            str(head)
            for head in (heads if head_pattern == "*" else select(head_pattern, heads))
            if head not in pruned_set
        ]
        if kept_names:
            remaining[",".join(kept_names) + (f":{pairs[0]}" if len(pairs) == 1 else "")] = bits
    return remaining


def describe_weight_rules(rules: Iterable[WeightRule]) -> list[str]:
    """A line for each part."""
    by_part: dict[str, list[WeightRule]] = {}
    for rule in rules:
        by_part.setdefault(rule.part, []).append(rule)
    group_size = next(rule.group_size for part_rules in by_part.values() for rule in part_rules)
    lines = [f"Weights are stored at few bits, in groups of {group_size}."]
    for part, part_rules in by_part.items():
        if part in NON_HEAD_PARTS:
            lines.append(f"  {part}: {part_rules[0].bits} bits")
        else:
            counts = ", ".join(f"{len(rule.heads)} at {rule.bits} bits" for rule in part_rules)
            lines.append(f"  W_{part.upper()}: {counts}")
    return lines


def _parse_pattern(pattern: object) -> tuple[str, tuple[str, ...]]:
    if not isinstance(pattern, str):
        raise HeadwiseError(f"weights are named by head and part: '*', '5.1', '5.1:qk', 'mlp'; got {pattern!r}.")
    head_pattern, _, pair = pattern.partition(":")
    if pair and pair not in PROJECTION_PAIRS:
        raise HeadwiseError(f"a head has the pairs qk and vo: '5.1:qk'; got {pattern!r}.")
    head_pattern = head_pattern.strip()
    if head_pattern.isalpha() and head_pattern not in NON_HEAD_PARTS:
        raise HeadwiseError(f"weights beside those of heads are {' and '.join(NON_HEAD_PARTS)}; got {head_pattern!r}.")
    return head_pattern, (pair,) if pair else PROJECTION_PAIRS


def _max_bits_per_kv_head(
    head_bits: Mapping[Address, int], layers: Mapping[LayerAddress, "AttentionSpec"]
) -> dict[Address, int]:
    """Of each key head, the most bits among the heads that read it."""
    kv_bits: dict[Address, int] = {}
    for layer_address, layer in layers.items():
        for number, kv_index in zip(layer.head_ids, layer.kv_of_head, strict=True):
            kv_head = layer_address.head_address(layer.kv_head_ids[kv_index])
            kv_bits[kv_head] = max(kv_bits.get(kv_head, 0), head_bits[layer_address.head_address(number)])
    return kv_bits


def _rules_for_part(part: str, bits: Mapping[Address, int], group_size: int) -> list[WeightRule]:
    """One rule for each number of bits; what is left as it is is not told."""
    by_bits: dict[int, list[str]] = {}
    for head, count in bits.items():
        if count != FULL_PRECISION:
            by_bits.setdefault(count, []).append(str(head))
    return [WeightRule(part, count, tuple(heads), group_size) for count, heads in sorted(by_bits.items(), reverse=True)]


def filter_rules(rules: Iterable[WeightRule], heads: set[str], kv_heads: set[str]) -> tuple[WeightRule, ...]:
    """The rules of a model of which these heads, and these key heads, are left."""
    filtered = []
    for rule in rules:
        present = tuple(head for head in rule.heads if head in (heads if rule.part in "qo" else kv_heads))
        if present or not rule.heads:
            filtered.append(replace(rule, heads=present))
    return tuple(filtered)


def layer_bits_from_rules(
    rules: Iterable[WeightRule], layers: Mapping[LayerAddress, "AttentionSpec"], activation_bits: int
) -> dict[LayerAddress, LayerBits]:
    """The same by layer; a rule for what is not there, or two for the same, are refused."""
    rules = tuple(rules)
    bits_of_head: dict[tuple[str, Address], int] = {}
    non_head_parts: list[str] = []
    for rule in rules:
        if not isinstance(rule, WeightRule):
            raise HeadwiseError(f"weights of a spec are WeightRules, as spec.quantized(4) makes them; got {rule!r}.")
        non_head_parts += [] if rule.heads else [rule.part]
        for head in map(Address.parse, rule.heads):
            layer = layers.get(head.layer_address)
            present_ids = () if layer is None else layer.head_ids if rule.part in "qo" else layer.kv_head_ids
            if head.head not in present_ids or (rule.part, head) in bits_of_head:
                problem = "is named twice" if (rule.part, head) in bits_of_head else "is not there"
                raise HeadwiseError(f"bits of W_{rule.part.upper()}: head {head} {problem}; quantize the model again.")
            bits_of_head[rule.part, head] = rule.bits
    group_sizes = {rule.group_size for rule in rules}
    if len(group_sizes) > 1 or len(set(non_head_parts)) < len(non_head_parts):
        raise HeadwiseError("rules for weights name each part once and share one group_size; quantize the model again.")
    bits_by_layer: dict[LayerAddress, LayerBits] = {}
    for layer_address in dict.fromkeys(head.layer_address for _, head in bits_of_head):
        layer, group_size = layers[layer_address], next(iter(group_sizes))
        part_bits = {
            part: tuple(bits_of_head.get((part, layer_address.head_address(n)), FULL_PRECISION) for n in range(count))
            for part, count in zip("qkvo", (layer.heads, layer.kv_heads, layer.kv_heads, layer.heads), strict=True)
        }
        bits_by_layer[layer_address] = LayerBits(**part_bits, group_size=group_size, activation_bits=activation_bits)
    return bits_by_layer
