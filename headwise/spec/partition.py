"""What each of several processes holds of a model: whole heads, a part of every MLP, a part of the vocabulary. No torch.

A layer is the sum of what its heads write, so any heads can be anywhere and shares need not be even. In each layer heads
that read the same keys stay together, the largest such group first, each with the process that has least to do; where there
are fewer groups than processes the largest are cut in two, and both halves have a copy of the keys.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from headwise.errors import HeadwiseError
from headwise.spec.attention import AttentionSpec
from headwise.spec.model import ModelSpec
from headwise.spec.weight_bits import FULL


@dataclass(frozen=True)
class Share:
    """What one process holds. Heads are told by layer, as in `ModelSpec.kept`; `hidden` and `vocab` begin and end there."""

    number: int  # of the process, from 0
    heads: tuple[tuple[str, tuple[int, ...]], ...]
    hidden: tuple[int, int]
    vocab: tuple[int, int]

    @cached_property
    def by_layer(self) -> dict[str, tuple[int, ...]]:
        """The heads of each layer."""
        return dict(self.heads)

    def of(self, spec: ModelSpec) -> ModelSpec:
        """The smaller model that this process holds: a spec with its heads alone."""
        mine = [site.head(number) for site in spec.sites for number in self.by_layer[str(site)]]
        others = set(spec.addresses) - set(mine)
        small = spec.without([address for address in spec.addresses if address in others]) if others else spec
        return replace(small, hidden=self.hidden[1] - self.hidden[0], vocab=self.vocab[1] - self.vocab[0])


def share_out(spec: ModelSpec, processes: int) -> tuple[Share, ...]:
    """The shares of so many processes.

    >>> from headwise.spec.presets import preset
    >>> one, other = share_out(preset("smollm2-135m"), 2)
    >>> one.by_layer["0"], other.by_layer["0"]  # three groups of three
    ((0, 1, 2, 6, 7, 8), (3, 4, 5))
    >>> one.by_layer["1"], other.by_layer["1"]  # and by turns
    ((3, 4, 5), (0, 1, 2, 6, 7, 8))
    >>> len(one.of(preset("smollm2-135m")).addresses), len(other.of(preset("smollm2-135m")).addresses)
    (135, 135)
    """
    if type(processes) is not int or processes < 1:
        raise HeadwiseError(f"a model is shared by 1 process or more; got {processes!r}.")
    layers = {str(site): spec.attention_at(site) for site in spec.sites}
    most = max((len(layer.head_ids) for layer in layers.values()), default=0)
    if processes > max(1, most):
        raise HeadwiseError(
            f"{processes} processes are more than the {most} heads of the largest layer, and each holds whole heads; "
            f"start at most {max(1, most)}."
        )
    for what, count in (("tokens in the vocabulary", spec.vocab), ("channels in the MLPs", spec.hidden)):
        if processes > count:
            raise HeadwiseError(f"{processes} processes are more than the {count} {what}; start fewer.")
    if processes > 1 and spec.activations != FULL:
        raise HeadwiseError(
            "activations at 8 bits have one scale for a row that no process sees whole; quantise weights alone."
        )
    total = [0] * processes
    heads: list[dict[str, tuple[int, ...]]] = [{} for _ in range(processes)]
    for name, layer in layers.items():
        shares = _spread(_pieces(layer, processes), total)
        for process, mine in enumerate(shares):
            heads[process][name] = mine
            total[process] += len(mine)
    bits, group = spec.bits_of("mlp")
    hidden = _ranges(spec.hidden, processes, 1 if bits == FULL else min(group, spec.hidden))
    vocab = _ranges(spec.vocab, processes)
    return tuple(Share(n, tuple(heads[n].items()), hidden[n], vocab[n]) for n in range(processes))


def _pieces(layer: AttentionSpec, processes: int) -> list[tuple[int, ...]]:
    """Heads that stay together, the most first: whole groups, or halves of them where groups are too few."""
    groups: dict[int, list[int]] = {}
    for head, key in zip(layer.head_ids, layer.kv_of_head, strict=True):
        groups.setdefault(key, []).append(head)
    pieces = [tuple(some) for some in groups.values()]
    while pieces and len(pieces) < min(processes, len(layer.head_ids)):
        largest = max(pieces, key=len)
        pieces.remove(largest)
        middle = -(-len(largest) // 2)
        pieces += [largest[:middle], largest[middle:]]
    return sorted(pieces, key=lambda some: (-len(some), some))


def _spread(pieces: Iterable[tuple[int, ...]], total: list[int]) -> list[tuple[int, ...]]:
    """Each piece goes to the process with fewest heads in this layer, of several to the one with fewest in all."""
    here: list[list[int]] = [[] for _ in total]
    for piece in pieces:
        least = min(range(len(total)), key=lambda process: (len(here[process]), total[process] + len(here[process])))
        here[least] += piece
    return [tuple(sorted(some)) for some in here]


def _ranges(count: int, processes: int, step: int = 1) -> list[tuple[int, int]]:
    """Neighbouring parts, as even as can be; borders lie at multiples of `step`, where weights at few bits can be cut."""
    steps = -(-count // step)
    if steps < processes:
        raise HeadwiseError(f"{count} channels in groups of {step} cannot be cut into {processes} parts; start fewer.")
    borders = [min(count, step * (steps * n // processes)) for n in range(processes + 1)]
    return list(pairwise(borders))
