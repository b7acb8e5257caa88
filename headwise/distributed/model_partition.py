"""The heads, MLP channels and vocabulary rows that each process holds of a model. No torch.

A layer is the sum of the outputs of its heads, so any process can hold any heads, and parts may have different sizes. In each
layer, heads that share a KV head stay together. Groups are assigned by size, largest first, each to the process with the
fewest heads. If there are fewer groups than processes, the largest are split in two, and both halves have a copy of the KV
head.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from headwise.errors import ArgumentError, UnsupportedModelError
from headwise.spec.attention import AttentionSpec
from headwise.spec.model import ModelSpec
from headwise.spec.weight_bits import FULL_PRECISION


@dataclass(frozen=True)
class RankPartition:
    """The part of a model that one process holds.

    Attributes:
        rank: Rank of the process, from 0.
        heads: Heads of each layer, as in `ModelSpec.kept_heads`.
        mlp_range, vocab_range: First MLP channel and vocabulary row, and the end of the range.
    """

    rank: int
    heads: tuple[tuple[str, tuple[int, ...]], ...]
    mlp_range: tuple[int, int]
    vocab_range: tuple[int, int]

    @cached_property
    def heads_by_layer(self) -> dict[str, tuple[int, ...]]:
        """Heads of each layer, by layer address."""
        return dict(self.heads)

    def local_spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec of the smaller model that this process holds."""
        own_heads = [
            layer_address.head_address(number)
            for layer_address in spec.layer_addresses
            for number in self.heads_by_layer[str(layer_address)]
        ]
        other_heads = set(spec.head_addresses) - set(own_heads)
        local_spec = (
            spec.without([address for address in spec.head_addresses if address in other_heads])
            if other_heads
            else spec
        )
        return replace(
            local_spec, mlp_width=self.mlp_range[1] - self.mlp_range[0], vocab=self.vocab_range[1] - self.vocab_range[0]
        )


def partition_model(spec: ModelSpec, processes: int) -> tuple[RankPartition, ...]:
    """Split a model over a number of processes.

    >>> from headwise.spec.presets import preset
    >>> first, second = partition_model(preset("smollm2-135m"), 2)
    >>> first.heads_by_layer["0"], second.heads_by_layer["0"]  # three groups of three
    ((0, 1, 2, 6, 7, 8), (3, 4, 5))
    >>> first.heads_by_layer["1"], second.heads_by_layer["1"]  # the larger part alternates
    ((3, 4, 5), (0, 1, 2, 6, 7, 8))
    >>> [len(part.local_spec(preset("smollm2-135m")).head_addresses) for part in (first, second)]
    [135, 135]
    """
    if type(processes) is not int or processes < 1:
        raise ArgumentError(
            f"processes: must be an integer of at least 1. Got {processes!r}. Use processes=2, for example."
        )
    layers = {str(layer_address): spec.attention_at(layer_address) for layer_address in spec.layer_addresses}
    max_heads = max((len(layer.head_ids) for layer in layers.values()), default=0)
    if processes > max(1, max_heads):
        raise UnsupportedModelError(
            f"processes: each process needs at least one complete head, and the largest layer has {max_heads} heads. "
            f"Got {processes} processes. Start at most {max(1, max_heads)}."
        )
    for unit, count in (("tokens in the vocabulary", spec.vocab), ("channels in the MLPs", spec.mlp_width)):
        if processes > count:
            raise UnsupportedModelError(
                f"processes: the model has only {count} {unit}. Got {processes} processes. Start at most {count}."
            )
    if processes > 1 and spec.attention.qk_norm is not None and spec.attention.qk_norm.over == "width":
        raise UnsupportedModelError(
            "model: its queries and keys are normalized over all heads, so its heads cannot be split over processes. Use "
            "processes=1."
        )
    if processes > 1 and spec.attention.latent is not None:
        raise UnsupportedModelError(
            "model: its heads share latents (MLA), so they cannot be split over processes. Use processes=1."
        )
    if processes > 1 and spec.activation_bits != FULL_PRECISION:
        raise UnsupportedModelError(
            "model: a model with 8-bit activations cannot be split over processes, because the activations need one scale "
            "per row, and each process has only a part of a row. Quantize only the weights: omit activation_bits."
        )
    heads_per_process = [0] * processes
    heads_by_process: list[dict[str, tuple[int, ...]]] = [{} for _ in range(processes)]
    for name, layer in layers.items():
        assignments = _assign_groups(_inseparable_head_groups(layer, processes), heads_per_process)
        for process, own_heads in enumerate(assignments):
            heads_by_process[process][name] = own_heads
            heads_per_process[process] += len(own_heads)
    bits, group_size = spec.bits_and_group_size("mlp")
    mlp_ranges = _ranges(spec.mlp_width, processes, 1 if bits == FULL_PRECISION else min(group_size, spec.mlp_width))
    vocab_ranges = _ranges(spec.vocab, processes)
    return tuple(
        RankPartition(rank, tuple(heads_by_process[rank].items()), mlp_ranges[rank], vocab_ranges[rank])
        for rank in range(processes)
    )


def _inseparable_head_groups(layer: AttentionSpec, processes: int) -> list[tuple[int, ...]]:
    """Return heads that stay together, largest group first: KV groups, split in halves if there are too few."""
    groups: dict[int, list[int]] = {}
    for head, kv_index in zip(layer.head_ids, layer.kv_of_head, strict=True):
        groups.setdefault(kv_index, []).append(head)
    parts = [tuple(group) for group in groups.values()]
    while parts and len(parts) < min(processes, len(layer.head_ids)):
        largest = max(parts, key=len)
        parts.remove(largest)
        middle = -(-len(largest) // 2)
        parts += [largest[:middle], largest[middle:]]
    return sorted(parts, key=lambda group: (-len(group), group))


def _assign_groups(groups: Iterable[tuple[int, ...]], heads_per_process: list[int]) -> list[tuple[int, ...]]:
    """Assign each group to the process with the fewest heads in this layer; ties go to the fewest heads in all layers."""
    assigned: list[list[int]] = [[] for _ in heads_per_process]
    for group in groups:
        target = min(
            range(len(heads_per_process)),
            key=lambda process: (len(assigned[process]), heads_per_process[process] + len(assigned[process])),
        )
        assigned[target] += group
    return [tuple(sorted(heads)) for heads in assigned]


def _ranges(count: int, processes: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Split a count into contiguous ranges of similar size; borders are multiples of `multiple`, a quantization group."""
    blocks = -(-count // multiple)
    if blocks < processes:
        raise UnsupportedModelError(
            f"processes: {count} MLP channels in quantization groups of {multiple} cannot be split into {processes} parts. "
            f"Start at most {blocks} processes."
        )
    boundaries = [min(count, multiple * (blocks * index // processes)) for index in range(processes + 1)]
    return list(pairwise(boundaries))
