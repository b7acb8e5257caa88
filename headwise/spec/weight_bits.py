"""Bits of quantized weights, by head and part. Does not import torch.

Each head has four matrices in two pairs: W_Q and W_K (qk), W_V and W_O (vo). If several heads share W_K and W_V, these are
stored at the largest number of bits that any of the heads is given. The parts outside of heads are the MLPs and the
vocabulary (the output projection and, if tied, the token embedding).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from headwise.errors import ArgumentError, suggest_names
from headwise.spec.address import Address, LayerAddress, select

if TYPE_CHECKING:
    from headwise.spec.attention import AttentionSpec

WEIGHT_BITS = (16, 8, 4, 3, 2)  # 16 bits are a 16-bit float without a scale
FULL_PRECISION = 32  # not quantized, in the dtype of the model
GROUP_SIZE = 32  # number of weights along the input that share a scale
PROJECTION_PAIRS = ("qk", "vo")
NON_HEAD_PARTS = ("mlp", "vocabulary")

Basis = Literal["given", "balanced", "random"]  # basis of the head channels in which weights are quantized
BASES = ("given", "balanced", "random")

# one number of bits for all weights, or bits by head and part: {"*": 8, "5.1": 4, "5.2:qk": 3, "mlp": 8}
BitAllocation = int | Mapping[str, int]


@dataclass(frozen=True)
class WeightRule:
    """Weights of one part that are quantized with the same bits and group size.

    Attributes:
        part: "q" or "o" (of heads), "k" or "v" (of KV heads), "mlp" or "vocabulary".
        bits: Bits per weight.
        heads: Addresses of the heads; for k and v, numbered by the KV heads of the layer. Empty for mlp and vocabulary.
        group_size: Number of weights along the input that share a scale.

    >>> str(WeightRule("q", 4, ("5.1", "5.2")))
    'W_Q of 5.1 5.2: 4 bits in groups of 32'
    """

    part: str
    bits: int
    heads: tuple[str, ...] = ()
    group_size: int = GROUP_SIZE

    def __post_init__(self) -> None:
        if self.part not in (*"qkvo", *NON_HEAD_PARTS):
            raise ArgumentError(f"WeightRule part={self.part!r}: unknown. Use q, k, v, o, mlp or vocabulary.")
        check_bits(self.bits)
        check_group_size(self.group_size)
        if bool(self.heads) == (self.part in NON_HEAD_PARTS):
            advice = (
                "The part has no heads: omit heads"
                if self.heads
                else "The part needs heads, for example heads=('5.1',)"
            )
            raise ArgumentError(
                f"WeightRule(part={self.part!r}, heads={self.heads}): heads do not fit the part. {advice}."
            )

    def __str__(self) -> str:
        name = self.part if self.part in NON_HEAD_PARTS else f"W_{self.part.upper()} of {' '.join(self.heads)}"
        return f"{name}: {self.bits} bits in groups of {self.group_size}"


@dataclass(frozen=True)
class LayerBits:
    """Bits per weight of each original head of an attention layer. 32 means not quantized.

    Attributes:
        q: Bits of W_Q of each head.
        k: Bits of W_K of each KV head.
        v: Bits of W_V of each KV head.
        o: Bits of W_O of each head.
        group_size: Number of weights along the input that share a scale.
        activation_bits: Bits of the activations that quantized weights are multiplied by, quantized row by row.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    o: tuple[int, ...]
    group_size: int = GROUP_SIZE
    activation_bits: int = FULL_PRECISION


def check_bits(bits: object) -> None:
    """Raise if weights cannot be stored at this number of bits."""
    if type(bits) is not int or bits not in WEIGHT_BITS:
        allowed = ", ".join(map(str, WEIGHT_BITS[:-1]))
        raise ArgumentError(f"bits={bits!r}: not supported for weights. Use {allowed} or {WEIGHT_BITS[-1]} bits.")


def check_group_size(group_size: object) -> None:
    """Raise if a group size is not an integer of at least 1."""
    if type(group_size) is not int or group_size < 1:
        raise ArgumentError(
            f"group_size={group_size!r}: must be an integer of at least 1, the number of weights that share a scale."
        )


def check_basis(basis: str) -> None:
    """Raise if a basis has an unknown name."""
    if basis not in BASES:
        raise ArgumentError(f"basis={basis!r}: unknown; {suggest_names(str(basis), BASES)}")


def row_bytes(elements: int, bits: int, group_size: int = GROUP_SIZE, element_bytes: int = 4) -> int:
    """Return the bytes of a packed row with a 4-byte scale per group. At 32 bits each number takes `element_bytes` bytes.

    >>> row_bytes(576, 4), row_bytes(576, 3), row_bytes(576, 32)  # 288 + 72, 216 + 72, 2304
    (360, 288, 2304)
    """
    if bits in (FULL_PRECISION, 16):
        return elements * (element_bytes if bits == FULL_PRECISION else 2)
    return math.ceil(elements * bits / 8) + 4 * math.ceil(elements / max(1, min(group_size, elements)))


def row_bytes_saved(elements: int, bits: int, group_size: int, element_bytes: int) -> int:
    """Return the bytes that quantization saves in one row."""
    return elements * element_bytes - row_bytes(elements, bits, group_size, element_bytes)


def total_head_bytes_saved(layers: Mapping[LayerAddress, "AttentionSpec"], element_bytes: int) -> int:
    """Return the bytes that quantization saves over all heads of a model."""
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
    """Convert a bit allocation into weight rules.

    Args:
        allocation: Bits for all weights, or bits by pattern. A head pattern may end in :qk or :vo. If two patterns select
            the same weights, the later pattern wins. 32 means not quantized.
        layers: Attention layers of the model.
        group_size: Number of weights along the input that share a scale.
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
    """Return the allocation without the pruned heads."""
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
    """Describe weight rules: a heading, then one line per part."""
    by_part: dict[str, list[WeightRule]] = {}
    for rule in rules:
        by_part.setdefault(rule.part, []).append(rule)
    group_size = next(rule.group_size for part_rules in by_part.values() for rule in part_rules)
    lines = [f"Weights are quantized in groups of {group_size}."]
    for part, part_rules in by_part.items():
        if part in NON_HEAD_PARTS:
            lines.append(f"  {part}: {part_rules[0].bits} bits")
        else:
            counts = ", ".join(f"{len(rule.heads)} at {rule.bits} bits" for rule in part_rules)
            lines.append(f"  W_{part.upper()}: {counts}")
    return lines


def _parse_pattern(pattern: object) -> tuple[str, tuple[str, ...]]:
    if not isinstance(pattern, str):
        raise ArgumentError(
            f"weights: the keys must be strings such as '*', '5.1', '5.1:qk' or 'mlp'. Got {pattern!r}."
        )
    head_pattern, _, pair = pattern.partition(":")
    if pair and pair not in PROJECTION_PAIRS:
        raise ArgumentError(
            f"weights: unknown pair of matrices after the colon. Got {pattern!r}. Use :qk or :vo, for example '5.1:qk'."
        )
    head_pattern = head_pattern.strip()
    if head_pattern.isalpha() and head_pattern not in NON_HEAD_PARTS:
        raise ArgumentError(
            f"weights: unknown part {head_pattern!r}. Use {' or '.join(NON_HEAD_PARTS)}, or a head pattern such as '5.1'."
        )
    return head_pattern, (pair,) if pair else PROJECTION_PAIRS


def _max_bits_per_kv_head(
    head_bits: Mapping[Address, int], layers: Mapping[LayerAddress, "AttentionSpec"]
) -> dict[Address, int]:
    """Return the largest number of bits among the heads that share each KV head."""
    kv_bits: dict[Address, int] = {}
    for layer_address, layer in layers.items():
        for number, kv_index in zip(layer.head_ids, layer.kv_of_head, strict=True):
            kv_head = layer_address.head_address(layer.kv_head_ids[kv_index])
            kv_bits[kv_head] = max(kv_bits.get(kv_head, 0), head_bits[layer_address.head_address(number)])
    return kv_bits


def _rules_for_part(part: str, bits: Mapping[Address, int], group_size: int) -> list[WeightRule]:
    """Return one rule per number of bits. Heads that are not quantized get no rule."""
    by_bits: dict[int, list[str]] = {}
    for head, count in bits.items():
        if count != FULL_PRECISION:
            by_bits.setdefault(count, []).append(str(head))
    return [WeightRule(part, count, tuple(heads), group_size) for count, heads in sorted(by_bits.items(), reverse=True)]


def filter_rules(rules: Iterable[WeightRule], heads: set[str], kv_heads: set[str]) -> tuple[WeightRule, ...]:
    """Return the rules restricted to the remaining heads and KV heads."""
    filtered = []
    for rule in rules:
        present = tuple(head for head in rule.heads if head in (heads if rule.part in "qo" else kv_heads))
        if present or not rule.heads:
            filtered.append(replace(rule, heads=present))
    return tuple(filtered)


def layer_bits_from_rules(
    rules: Iterable[WeightRule], layers: Mapping[LayerAddress, "AttentionSpec"], activation_bits: int
) -> dict[LayerAddress, LayerBits]:
    """Return the bits of each layer. Raise if a rule names a missing head, or if two rules name the same weights."""
    rules = tuple(rules)
    bits_of_head: dict[tuple[str, Address], int] = {}
    non_head_parts: list[str] = []
    for rule in rules:
        if not isinstance(rule, WeightRule):
            raise ArgumentError(
                f"weight_rules: must be WeightRule objects. Got {rule!r}. Use spec.quantized(4) to create them."
            )
        non_head_parts += [] if rule.heads else [rule.part]
        for head in map(Address.parse, rule.heads):
            layer = layers.get(head.layer_address)
            present_ids = () if layer is None else layer.head_ids if rule.part in "qo" else layer.kv_head_ids
            if head.head not in present_ids or (rule.part, head) in bits_of_head:
                problem = "is listed twice" if (rule.part, head) in bits_of_head else "does not exist in the model"
                raise ArgumentError(
                    f"weight_rules: the rules of W_{rule.part.upper()} are not valid, because head {head} {problem}. "
                    "Quantize the model again."
                )
            bits_of_head[rule.part, head] = rule.bits
    group_sizes = {rule.group_size for rule in rules}
    if len(group_sizes) > 1 or len(set(non_head_parts)) < len(non_head_parts):
        raise ArgumentError(
            f"weight_rules: each part must occur once, and all rules must have the same group_size. Got parts "
            f"{non_head_parts} and group sizes {sorted(group_sizes)}. Quantize the model again."
        )
    bits_by_layer: dict[LayerAddress, LayerBits] = {}
    for layer_address in dict.fromkeys(head.layer_address for _, head in bits_of_head):
        layer, group_size = layers[layer_address], next(iter(group_sizes))
        part_bits = {
            part: tuple(bits_of_head.get((part, layer_address.head_address(n)), FULL_PRECISION) for n in range(count))
            for part, count in zip("qkvo", (layer.heads, layer.kv_heads, layer.kv_heads, layer.heads), strict=True)
        }
        bits_by_layer[layer_address] = LayerBits(**part_bits, group_size=group_size, activation_bits=activation_bits)
    return bits_by_layer
