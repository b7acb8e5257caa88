"""Bits by head under a budget: where they cost least by measured sensitivity, beside uniform bits and random mixes.

What counts is the drift (`look/worth/sensitivity`), which knows a pair's cost better than the loss on as many texts. Each
pair of matrices (qk, vo) of a key head, and of all heads that read it, gets one of the `choices`. All begin at the most
bits; then that step down is taken which costs least a bit saved, until the budget is kept. Of a pair's choices only those are
steps that lie on the lower hull of cost against bits, and a cost measured to fall with fewer bits is taken as none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headwise.analysis.ablation.sensitivity import Sensitivity
from headwise.compression.evaluation import Estimate, PairedEvaluation, finite
from headwise.compression.quantize import Basis, quantise
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.progress import Progress
from headwise.spec import Address, ModelSpec
from headwise.spec.weight_bits import WEIGHT_BITS, check_bits, row_bytes
from headwise.training.setup import weights_digest

Pair = tuple[str, str]  # key head, qk or vo


@dataclass(frozen=True)
class Allocation:
    """Bits for every pair of matrices, and how they were chosen."""

    pairs: tuple[Pair, ...]
    heads: tuple[tuple[str, ...], ...]  # of each pair, who reads it
    numbers: tuple[int, ...]  # in each pair
    bits: tuple[int, ...]
    budget: float  # mean bits a number, scales not counted
    expected: float  # what the bits cost if costs added up

    @property
    def mean_bits(self) -> float:
        """Mean bits a number, scales not counted."""
        return float(np.dot(self.numbers, self.bits) / sum(self.numbers))

    @property
    def weights(self) -> dict[str, int]:
        """As `hw.quantise` takes it: {"0.0,0.1,0.2:qk": 4, …}."""
        parts = zip(self.pairs, self.heads, self.bits, strict=True)
        return {f"{','.join(heads)}:{pair}": bits for (_, pair), heads, bits in parts}

    def counts(self) -> dict[int, int]:
        """How many pairs have so many bits."""
        return {bits: self.bits.count(bits) for bits in sorted(set(self.bits), reverse=True)}

    def shuffled(self, seed: int) -> "Allocation":
        """A random mix that costs the same: bits dealt anew among pairs of the same size."""
        draws, bits = np.random.default_rng(seed), np.array(self.bits)
        for size in sorted(set(self.numbers)):
            alike = [i for i, number in enumerate(self.numbers) if number == size]
            bits[alike] = draws.permutation(bits[alike])
        made = {**vars(self), "bits": tuple(map(int, bits)), "expected": float("nan")}
        return Allocation(**made)


def allocate(
    model: Transformer,
    found: Sensitivity,
    *,
    mean_bits: float | None = None,
    megabytes: float | None = None,
    choices: Sequence[int] = WEIGHT_BITS,
) -> Allocation:
    """Bits for the heads of a model so that their weights keep a budget: of mean bits, or of megabytes with scales.

    A cost that was not measured at a choice is taken from the nearest one that was, by the square of the step between
    codes: 4 bits to 3 is (7 / 3)² times as much.

    >>> from headwise.analysis.ablation.sensitivity import sensitivity
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=32, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> found = sensitivity(model, ["To be or not to be", "that is the question"])
    >>> made = allocate(model, found, mean_bits=3.5, choices=(4, 3))
    >>> made.mean_bits, made.counts()
    (3.5, {4: 4, 3: 4})
    """
    choices = _checked(mean_bits, megabytes, choices)
    if found.about["model"] != weights_digest(model):
        raise HeadwiseError(
            "the sensitivities are those of another model; measure this one: hw.sensitivity(model, corpus)."
        )
    pairs, heads = _pairs(model.spec, found)
    numbers = [_numbers(model.spec, key, pair, len(own)) for (key, pair), own in zip(pairs, heads, strict=True)]
    group = int(found.about["group"])
    costs = [[_cost(found, pair, bits) for bits in choices] for pair in pairs]
    taken = [[_taken(model.spec, pair, len(own), bits, group, mean_bits is None) for bits in choices]
             for pair, own in zip(pairs, heads, strict=True)]  # fmt: skip
    most = mean_bits * sum(numbers) if mean_bits is not None else (megabytes or 0) * 1e6
    chosen = _choose(costs, taken, most, "bits" if mean_bits is not None else "bytes")
    made = [costs[i][place] for i, place in enumerate(chosen)]
    bits = tuple(choices[place] for place in chosen)
    budget = float(np.dot(numbers, bits) / sum(numbers)) if mean_bits is None else float(mean_bits)
    return Allocation(tuple(pairs), tuple(heads), tuple(numbers), bits, budget, float(sum(made)))


def _checked(mean_bits: float | None, megabytes: float | None, choices: Sequence[int]) -> list[int]:
    if (mean_bits is None) == (megabytes is None):
        raise HeadwiseError("give one budget: mean_bits=3.5, or megabytes=20.")
    for bits in choices:
        check_bits(bits)
    if not choices:
        raise HeadwiseError("give the bits to choose from: choices=(8, 4, 3).")
    return sorted(set(choices), reverse=True)


def _pairs(spec: ModelSpec, found: Sensitivity) -> tuple[list[Pair], list[tuple[str, ...]]]:
    """The pairs that were measured; they must be all that the model has."""
    there: dict[Pair, tuple[str, ...]] = {
        (one.key, one.part): one.heads for one in found.settings if one.part in ("qk", "vo")
    }
    measured = {head for (_, part), own in there.items() for head in own if part == "qk"}
    if {part for _, part in there} != {"qk", "vo"} or measured != set(map(str, spec.addresses)):
        raise HeadwiseError(
            "bits are shared out among all heads, by both of their pairs; measure them all: hw.sensitivity(model, corpus)."
        )
    return list(there), list(there.values())


def _cost(found: Sensitivity, pair: Pair, bits: int) -> float:
    measured = {
        one.bits: float(drift)
        for one, drift in zip(found.settings, found.drift, strict=True)
        if (one.key, one.part) == pair
    }
    near = min(measured, key=lambda one: (abs(one - bits), -one))
    return measured[near] * ((2 ** (near - 1) - 1) / (2 ** (bits - 1) - 1)) ** 2


def _shapes(spec: ModelSpec, key: str, pair: str, heads: int) -> list[tuple[int, int]]:
    """Rows and numbers a row, of each matrix of a pair."""
    layer = spec.attention_at(Address.parse(key).site)
    share = layer.heads if layer.input == "slice" else 1
    if pair == "qk":
        return [(heads * layer.head_dim, layer.width // share), (layer.head_dim, layer.kv_width // share)]
    return [(layer.value_dim, layer.kv_width // share), (heads * layer.width, layer.value_dim)]


def _numbers(spec: ModelSpec, key: str, pair: str, heads: int) -> int:
    return sum(rows * row for rows, row in _shapes(spec, key, pair, heads))


def _taken(spec: ModelSpec, pair: Pair, heads: int, bits: int, group: int, as_bytes: bool) -> int:
    """What a pair takes of the budget: bits without scales, or bytes with them."""
    if not as_bytes:
        return _numbers(spec, *pair, heads) * bits
    return sum(rows * row_bytes(row, bits, group) for rows, row in _shapes(spec, *pair, heads))


def _choose(costs: list[list[float]], taken: list[list[int]], most: float, what: str) -> list[int]:
    """For each pair the place of its choice; choices have the most bits first."""
    steps: list[tuple[float, int, int, int]] = []
    for pair, (cost, takes) in enumerate(zip(costs, taken, strict=True)):
        rising = np.maximum.accumulate(np.maximum(cost, 0.0))
        place = 0
        while place < len(cost) - 1:
            slopes = [
                (float((rising[to] - rising[place]) / (takes[place] - takes[to])), to)
                for to in range(place + 1, len(cost))
            ]
            slope, to = min(slopes, key=lambda one: (one[0], -one[1]))
            steps.append((slope, len(steps), pair, to))
            place = to
    chosen, now = [0] * len(costs), float(sum(takes[0] for takes in taken))
    for _, _, pair, to in sorted(steps):
        if now <= most:
            break
        now -= taken[pair][chosen[pair]] - taken[pair][to]
        chosen[pair] = to
    if now > most:
        raise HeadwiseError(f"no choice keeps that budget: {now:,.0f} {what} are the least, {most:,.0f} were allowed.")
    return chosen


@dataclass(frozen=True)
class AllocationReport:
    """A mix beside uniform bits and random mixes of equal cost, on texts it was not chosen on; intervals over texts."""

    metric: str
    texts: int
    mean_bits: float
    counts: dict[int, int]
    clean: Estimate
    mix: Estimate  # loss − clean
    uniform: dict[int, Estimate]  # loss − clean, all heads at so many bits
    random: tuple[float, ...]  # loss − clean of random mixes, a seed each
    mix_less_random: Estimate | None  # the mix − their mean

    @property
    def outside(self) -> bool:
        """Whether the mix costs less than every random one."""
        return bool(self.random) and self.mix.mean < min(self.random)

    def rows(self) -> list[list[str | float]]:
        """What, mean bits, loss − clean, low, high; of random mixes the mean, the least and the most."""
        made: list[list[str | float]] = [["mix", self.mean_bits, *asdict(self.mix).values()]]
        made += [["uniform", bits, *asdict(figure).values()] for bits, figure in self.uniform.items()]
        if self.random:
            spread = [float(np.mean(self.random)), min(self.random), max(self.random)]
            made.append([f"random, {len(self.random)} mixes: mean, least, most", self.mean_bits, *spread])
        if self.mix_less_random is not None:
            made.append(["mix − random", "", *asdict(self.mix_less_random).values()])
        return made

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return asdict(self, dict_factory=finite) | {"outside": self.outside}


def report_allocation(
    model: Transformer,
    made: Allocation,
    on: Any,
    *,
    beside: Mapping[str, int] | None = None,
    uniform: Sequence[int] = (),
    seeds: int = 10,
    basis: Basis = "given",
    progress: Progress | None = None,
) -> AllocationReport:
    """Ask the model, the mix, uniform bits and random mixes about texts; `beside` are bits of MLPs and vocabulary in all."""
    evaluation, more = PairedEvaluation.of(model, on), dict(beside or {})
    every = [made.weights, *({"*": bits} for bits in uniform), *(made.shuffled(seed).weights for seed in range(seeds))]
    losses: list[np.ndarray] = []
    for weights in every:
        losses.append(evaluation.losses(quantise(model, weights | more, basis=basis)))
        if progress is not None:
            progress("models at few bits", len(losses), len(every))
    mix, flat, random = losses[0], losses[1 : 1 + len(uniform)], losses[1 + len(uniform) :]
    return AllocationReport(
        metric=evaluation.metric,
        texts=len(evaluation.counts),
        mean_bits=made.mean_bits,
        counts=made.counts(),
        clean=evaluation.estimate(evaluation.full),
        mix=evaluation.difference(mix, evaluation.full),
        uniform={bits: evaluation.difference(one, evaluation.full) for bits, one in zip(uniform, flat, strict=True)},
        random=tuple(float((one - evaluation.full).sum() / evaluation.counts.sum()) for one in random),
        mix_less_random=evaluation.difference_from_draws(mix, random) if random else None,
    )
