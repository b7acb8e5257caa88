"""Bits by head under a budget: where they cost least by measured sensitivity, beside uniform bits and random mixes.

What counts is the drift (`headwise.analysis.ablation.sensitivity`), which knows a pair's cost better than the loss on as
many texts. Each pair of matrices (qk, vo) of a key head, and of all heads that read it, gets one of the `choices`. All
begin at the most bits; then that step down is taken which costs least a bit saved, until the budget is kept. Of a pair's
choices only those are steps that lie on the lower hull of cost against bits, and a cost measured to fall with fewer bits is
taken as none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headwise.analysis.ablation.sensitivity import Sensitivity
from headwise.compression.paired_evaluation import LossEstimate, PairedEvaluator, nan_to_none
from headwise.compression.quantize import Basis, quantize
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from headwise.model.weights_digest import weights_digest
from headwise.progress import Progress
from headwise.spec import Address, ModelSpec
from headwise.spec.weight_bits import WEIGHT_BITS, check_bits, row_bytes

MatrixPair = tuple[str, str]  # key head, qk or vo


@dataclass(frozen=True)
class BitAllocation:
    """Bits for every pair of matrices, and how they were chosen."""

    pairs: tuple[MatrixPair, ...]
    heads: tuple[tuple[str, ...], ...]  # of each pair, who reads it
    parameters: tuple[int, ...]  # in each pair
    bits: tuple[int, ...]
    budget: float  # mean bits a number, scales not counted
    expected_cost: float  # what the bits cost if costs added up

    @property
    def mean_bits(self) -> float:
        """Mean bits a number, scales not counted."""
        return float(np.dot(self.parameters, self.bits) / sum(self.parameters))

    @property
    def bits_by_head_and_part(self) -> dict[str, int]:
        """As `hw.quantize` takes it: {"0.0,0.1,0.2:qk": 4, …}."""
        rows = zip(self.pairs, self.heads, self.bits, strict=True)
        return {f"{','.join(heads)}:{pair}": bits for (_, pair), heads, bits in rows}

    def parts_per_bits(self) -> dict[int, int]:
        """How many pairs have so many bits."""
        return {bits: self.bits.count(bits) for bits in sorted(set(self.bits), reverse=True)}

    def shuffled(self, seed: int) -> "BitAllocation":
        """A random mix that costs the same: bits dealt anew among pairs of the same size."""
        rng, bits = np.random.default_rng(seed), np.array(self.bits)
        for size in sorted(set(self.parameters)):
            same_size = [i for i, count in enumerate(self.parameters) if count == size]
            bits[same_size] = rng.permutation(bits[same_size])
        values = {**vars(self), "bits": tuple(map(int, bits)), "expected_cost": float("nan")}
        return BitAllocation(**values)


def allocate_bits(
    model: Transformer,
    sensitivity: Sensitivity,
    *,
    mean_bits: float | None = None,
    megabytes: float | None = None,
    choices: Sequence[int] = WEIGHT_BITS,
) -> BitAllocation:
    """Bits for the heads of a model so that their weights keep a budget: of mean bits, or of megabytes with scales.

    A cost that was not measured at a choice is taken from the nearest one that was, by the square of the step between
    codes: 4 bits to 3 is (7 / 3)² times as much.

    >>> from headwise.analysis.ablation.sensitivity import sensitivity
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=32, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> costs = sensitivity(model, ["To be or not to be", "that is the question"])
    >>> allocation = allocate_bits(model, costs, mean_bits=3.5, choices=(4, 3))
    >>> allocation.mean_bits, allocation.parts_per_bits()
    (3.5, {4: 4, 3: 4})
    """
    choices = _sorted_choices(mean_bits, megabytes, choices)
    if sensitivity.metadata["model"] != weights_digest(model):
        raise HeadwiseError(
            "the sensitivities are those of another model; measure this one: hw.sensitivity(model, corpus)."
        )
    pairs, heads = _measured_pairs(model.spec, sensitivity)
    parameters = [
        _parameter_count(model.spec, kv_head, pair, len(pair_heads))
        for (kv_head, pair), pair_heads in zip(pairs, heads, strict=True)
    ]
    group_size = int(sensitivity.metadata["group_size"])
    costs = [[_expected_cost(sensitivity, pair, bits) for bits in choices] for pair in pairs]
    usage = [[_budget_usage(model.spec, pair, len(pair_heads), bits, group_size, mean_bits is None) for bits in choices]
             for pair, pair_heads in zip(pairs, heads, strict=True)]  # fmt: skip
    max_usage = mean_bits * sum(parameters) if mean_bits is not None else (megabytes or 0) * 1e6
    choice_indices = _choose_bits(costs, usage, max_usage, "bits" if mean_bits is not None else "bytes")
    chosen_costs = [costs[i][choice] for i, choice in enumerate(choice_indices)]
    bits = tuple(choices[choice] for choice in choice_indices)
    budget = float(np.dot(parameters, bits) / sum(parameters)) if mean_bits is None else float(mean_bits)
    return BitAllocation(tuple(pairs), tuple(heads), tuple(parameters), bits, budget, float(sum(chosen_costs)))


def _sorted_choices(mean_bits: float | None, megabytes: float | None, choices: Sequence[int]) -> list[int]:
    if (mean_bits is None) == (megabytes is None):
        raise HeadwiseError("give one budget: mean_bits=3.5, or megabytes=20.")
    for bits in choices:
        check_bits(bits)
    if not choices:
        raise HeadwiseError("give the bits to choose from: choices=(8, 4, 3).")
    return sorted(set(choices), reverse=True)


def _measured_pairs(spec: ModelSpec, sensitivity: Sensitivity) -> tuple[list[MatrixPair], list[tuple[str, ...]]]:
    """The pairs that were measured; they must be all that the model has."""
    heads_of_pair: dict[MatrixPair, tuple[str, ...]] = {
        (setting.kv_head, setting.part): setting.heads
        for setting in sensitivity.targets
        if setting.part in ("qk", "vo")
    }
    measured = {head for (_, part), heads in heads_of_pair.items() for head in heads if part == "qk"}
    if {part for _, part in heads_of_pair} != {"qk", "vo"} or measured != set(map(str, spec.head_addresses)):
        raise HeadwiseError(
            "bits are shared out among all heads, by both of their pairs; measure them all: hw.sensitivity(model, corpus)."
        )
    return list(heads_of_pair), list(heads_of_pair.values())


def _expected_cost(sensitivity: Sensitivity, pair: MatrixPair, bits: int) -> float:
    measured = {
        entry.bits: float(drift)
        for entry, drift in zip(sensitivity.targets, sensitivity.kl_divergence, strict=True)
        if (entry.kv_head, entry.part) == pair
    }
    nearest = min(measured, key=lambda entry: (abs(entry - bits), -entry))
    return measured[nearest] * ((2 ** (nearest - 1) - 1) / (2 ** (bits - 1) - 1)) ** 2


def _matrix_shapes(spec: ModelSpec, kv_head: str, pair: str, heads: int) -> list[tuple[int, int]]:
    """Rows and numbers a row, of each matrix of a pair."""
    layer = spec.attention_at(Address.parse(kv_head).layer_address)
    input_slices = layer.heads if layer.head_input == "slice" else 1
    if pair == "qk":
        return [(heads * layer.head_dim, layer.width // input_slices), (layer.head_dim, layer.kv_width // input_slices)]
    return [(layer.value_dim, layer.kv_width // input_slices), (heads * layer.width, layer.value_dim)]


def _parameter_count(spec: ModelSpec, kv_head: str, pair: str, heads: int) -> int:
    return sum(rows * row_length for rows, row_length in _matrix_shapes(spec, kv_head, pair, heads))


def _budget_usage(spec: ModelSpec, pair: MatrixPair, heads: int, bits: int, group_size: int, as_bytes: bool) -> int:
    """What a pair takes of the budget: bits without scales, or bytes with them."""
    if not as_bytes:
        return _parameter_count(spec, *pair, heads) * bits
    return sum(
        rows * row_bytes(row_length, bits, group_size) for rows, row_length in _matrix_shapes(spec, *pair, heads)
    )


def _choose_bits(costs: list[list[float]], usage: list[list[int]], max_usage: float, unit: str) -> list[int]:
    """For each pair the place of its choice; choices have the most bits first."""
    steps: list[tuple[float, int, int, int]] = []
    for pair, (cost, pair_usage) in enumerate(zip(costs, usage, strict=True)):
        monotone_cost = np.maximum.accumulate(np.maximum(cost, 0.0))
        current = 0
        while current < len(cost) - 1:
            slopes = [
                (
                    float(
                        (monotone_cost[target] - monotone_cost[current]) / (pair_usage[current] - pair_usage[target])
                    ),
                    target,
                )
                for target in range(current + 1, len(cost))
            ]
            slope, target = min(slopes, key=lambda candidate: (candidate[0], -candidate[1]))
            steps.append((slope, len(steps), pair, target))
            current = target
    choices, total_usage = [0] * len(costs), float(sum(pair_usage[0] for pair_usage in usage))
    for _, _, pair, target in sorted(steps):
        if total_usage <= max_usage:
            break
        total_usage -= usage[pair][choices[pair]] - usage[pair][target]
        choices[pair] = target
    if total_usage > max_usage:
        raise HeadwiseError(
            f"no choice keeps that budget: {total_usage:,.0f} {unit} are the least, {max_usage:,.0f} were allowed."
        )
    return choices


@dataclass(frozen=True)
class BitAllocationReport:
    """A mix beside uniform bits and random mixes of equal cost, on texts it was not chosen on; intervals over texts."""

    metric: str
    texts: int
    mean_bits: float
    counts: dict[int, int]
    full_loss: LossEstimate
    mixed: LossEstimate  # loss − clean
    uniform: dict[int, LossEstimate]  # loss − clean, all heads at so many bits
    random: tuple[float, ...]  # loss − clean of random mixes, a seed each
    mixed_minus_random: LossEstimate | None  # the mix − their mean

    @property
    def beats_random(self) -> bool:
        """Whether the mix costs less than every random one."""
        return bool(self.random) and self.mixed.mean < min(self.random)

    def loss_rows(self) -> list[list[str | float]]:
        """What, mean bits, loss − clean, low, high; of random mixes the mean, the least and the most."""
        rows: list[list[str | float]] = [["mix", self.mean_bits, *asdict(self.mixed).values()]]
        rows += [["uniform", bits, *asdict(estimate).values()] for bits, estimate in self.uniform.items()]
        if self.random:
            mean_min_max = [float(np.mean(self.random)), min(self.random), max(self.random)]
            rows.append([f"random, {len(self.random)} mixes: mean, least, most", self.mean_bits, *mean_min_max])
        if self.mixed_minus_random is not None:
            rows.append(["mix − random", "", *asdict(self.mixed_minus_random).values()])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return asdict(self, dict_factory=nan_to_none) | {"beats_random": self.beats_random}


def report_allocation(
    model: Transformer,
    allocation: BitAllocation,
    corpus: Any,
    *,
    other_bits: Mapping[str, int] | None = None,
    uniform: Sequence[int] = (),
    seeds: int = 10,
    basis: Basis = "given",
    progress: Progress | None = None,
) -> BitAllocationReport:
    """Ask the model, the mix, uniform bits and random mixes about texts.

    `other_bits` are bits of MLPs and vocabulary in all.
    """
    evaluation, extra_bits = PairedEvaluator.of(model, corpus), dict(other_bits or {})
    bit_settings = [
        allocation.bits_by_head_and_part,
        *({"*": bits} for bits in uniform),
        *(allocation.shuffled(seed).bits_by_head_and_part for seed in range(seeds)),
    ]
    losses: list[np.ndarray] = []
    for weights in bit_settings:
        losses.append(evaluation.losses_per_text(quantize(model, weights | extra_bits, basis=basis)))
        if progress is not None:
            progress("models at few bits", len(losses), len(bit_settings))
    mixed_losses, uniform_losses, random_losses = losses[0], losses[1 : 1 + len(uniform)], losses[1 + len(uniform) :]
    return BitAllocationReport(
        metric=evaluation.metric,
        texts=len(evaluation.counts),
        mean_bits=allocation.mean_bits,
        counts=allocation.parts_per_bits(),
        full_loss=evaluation.mean_loss(evaluation.full_losses_per_text),
        mixed=evaluation.difference(mixed_losses, evaluation.full_losses_per_text),
        uniform={
            bits: evaluation.difference(setting_losses, evaluation.full_losses_per_text)
            for bits, setting_losses in zip(uniform, uniform_losses, strict=True)
        },
        random=tuple(
            float((setting_losses - evaluation.full_losses_per_text).sum() / evaluation.counts.sum())
            for setting_losses in random_losses
        ),
        mixed_minus_random=evaluation.difference_from_random(mixed_losses, random_losses) if random_losses else None,
    )
