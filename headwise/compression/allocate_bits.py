"""Allocate weight bits to heads under a budget, and compare with uniform bits and random allocations.

The cost of quantizing is the KL divergence that `headwise.analysis.ablation.quantization_sensitivity` measures. It has less
noise than the loss on the same number of texts. Each pair of matrices (qk or vo) of a KV head and its query heads gets one of
the `choices`.
All pairs start at the most bits. The step with the smallest cost per saved bit is taken until the budget is met. Steps go
along the lower convex hull of cost against bits, and a cost that falls with fewer bits counts as 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult
from headwise.compression.paired_evaluation import LossEstimate, PairedEvaluator, nan_to_none
from headwise.compression.quantize import Basis, quantize
from headwise.errors import ArgumentError
from headwise.model import ModelProtocol
from headwise.model.weights_digest import weights_digest
from headwise.progress import ProgressOption, callback_of, shows_progress
from headwise.spec import Address, ModelSpec
from headwise.spec.weight_bits import WEIGHT_BITS, check_bits, row_bytes

MatrixPair = tuple[str, str]  # address of the KV head, and "qk" or "vo"


@dataclass(frozen=True)
class BitAllocation:
    """Bits of every pair of matrices.

    Attributes:
        pairs: KV head address and part ("qk" or "vo") of each pair.
        heads: Addresses of the query heads of each pair.
        parameters: Number of weights of each pair.
        bits: Bits per weight of each pair.
        budget: Allowed mean bits per weight, without scales.
        expected_cost: Sum of the measured costs of all pairs.
    """

    pairs: tuple[MatrixPair, ...]
    heads: tuple[tuple[str, ...], ...]
    parameters: tuple[int, ...]
    bits: tuple[int, ...]
    budget: float
    expected_cost: float

    def __repr__(self) -> str:
        from headwise.ui.result_text import parts_per_bits_table

        return parts_per_bits_table(self).as_text()

    def _repr_html_(self) -> str:
        from headwise.ui.result_text import parts_per_bits_table

        return parts_per_bits_table(self).as_html()

    @property
    def mean_bits(self) -> float:
        """Mean bits per weight, without scales."""
        return float(np.dot(self.parameters, self.bits) / sum(self.parameters))

    @property
    def bits_by_head_and_part(self) -> dict[str, int]:
        """Bits in the format of `hw.quantize`: {"0.0,0.1,0.2:qk": 4, …}."""
        rows = zip(self.pairs, self.heads, self.bits, strict=True)
        return {f"{','.join(heads)}:{pair}": bits for (_, pair), heads, bits in rows}

    def parts_per_bits(self) -> dict[int, int]:
        """Number of pairs for each number of bits."""
        return {bits: self.bits.count(bits) for bits in sorted(set(self.bits), reverse=True)}

    def shuffled(self, seed: int) -> "BitAllocation":
        """Return a random allocation of equal size: bits are permuted among pairs of the same size."""
        rng, bits = np.random.default_rng(seed), np.array(self.bits)
        for size in sorted(set(self.parameters)):
            same_size = [i for i, count in enumerate(self.parameters) if count == size]
            bits[same_size] = rng.permutation(bits[same_size])
        values = {**vars(self), "bits": tuple(map(int, bits)), "expected_cost": float("nan")}
        return BitAllocation(**values)


def allocate_bits(
    model: ModelProtocol,
    sensitivity: SensitivityResult,
    *,
    mean_bits: float | None = None,
    megabytes: float | None = None,
    choices: Sequence[int] = WEIGHT_BITS,
) -> BitAllocation:
    """Allocate bits to the heads of a model so that their weights fit a budget at the smallest measured cost.

    The cost at bits that were not measured is extrapolated from the nearest measured bits by the square of the quantization
    step: from 4 bits to 3 it grows by a factor of (7 / 3)².

    Args:
        model: The native or attached model that was measured.
        sensitivity: Result of `hw.sensitivity(model, corpus)` for all heads and both parts, "qk" and "vo".
        mean_bits: Budget as mean bits per weight of the heads, without scales.
        megabytes: Budget as megabytes (1e6 bytes) of the heads, with scales. Give either this or `mean_bits`.
        choices: Bits to choose from.

    Returns:
        The bits of each pair of matrices. Pass `bits_by_head_and_part` to `hw.quantize`.

    Raises:
        ArgumentError: If no choice of bits fits the budget, or the sensitivity belongs to another model.

    >>> from headwise.analysis.ablation.quantization_sensitivity import sensitivity
    >>> from headwise.model import Transformer
    >>> from headwise.spec import AttentionSpec, ModelSpec
    >>> from headwise.text.build_tokenizers import byte_tokenizer
    >>> model = Transformer(ModelSpec(vocab=257, context=32, layers=2, attention=AttentionSpec(width=16, heads=2)))
    >>> model.tokenizer = byte_tokenizer()
    >>> costs = sensitivity(model, ["To be or not to be", "that is the question"])
    >>> allocation = allocate_bits(model, costs, mean_bits=3.5, choices=(4, 3))
    >>> allocation.mean_bits, allocation.parts_per_bits()
    (3.5, {4: 4, 3: 4})
    """
    choices = _validate_and_sort_choices(mean_bits, megabytes, choices)
    if sensitivity.metadata["model"] != weights_digest(model):
        raise ArgumentError(
            "sensitivity: it was measured on another model or with other weights. "
            "Measure this model: hw.sensitivity(model, corpus)."
        )
    pairs, heads = _matrix_pairs_with_heads(model.spec, sensitivity)
    parameters = [
        _parameter_count(model.spec, kv_head, pair, len(pair_heads))
        for (kv_head, pair), pair_heads in zip(pairs, heads, strict=True)
    ]
    group_size = int(sensitivity.metadata["group_size"])
    costs = [[_expected_cost(sensitivity, pair, bits) for bits in choices] for pair in pairs]
    as_bytes = mean_bits is None
    usage = [
        [_budget_usage(model.spec, pair, len(pair_heads), bits, group_size, as_bytes=as_bytes) for bits in choices]
        for pair, pair_heads in zip(pairs, heads, strict=True)
    ]
    max_usage = mean_bits * sum(parameters) if mean_bits is not None else (megabytes or 0) * 1e6
    choice_indices = _choose_bit_indices(costs, usage, max_usage, "bits" if mean_bits is not None else "bytes")
    chosen_costs = [costs[i][choice] for i, choice in enumerate(choice_indices)]
    bits = tuple(choices[choice] for choice in choice_indices)
    budget = float(np.dot(parameters, bits) / sum(parameters)) if mean_bits is None else float(mean_bits)
    return BitAllocation(tuple(pairs), tuple(heads), tuple(parameters), bits, budget, float(sum(chosen_costs)))


def _validate_and_sort_choices(mean_bits: float | None, megabytes: float | None, choices: Sequence[int]) -> list[int]:
    if (mean_bits is None) == (megabytes is None):
        raise ArgumentError(
            "mean_bits, megabytes: exactly one budget is needed. "
            f"Got mean_bits={mean_bits}, megabytes={megabytes}. Use mean_bits=3.5 or megabytes=20."
        )
    for bits in choices:
        check_bits(bits)
    if not choices:
        raise ArgumentError("choices: at least one number of bits is needed. Got none. Use choices=(8, 4, 3).")
    return sorted(set(choices), reverse=True)


def _matrix_pairs_with_heads(
    spec: ModelSpec, sensitivity: SensitivityResult
) -> tuple[list[MatrixPair], list[tuple[str, ...]]]:
    """Return the measured pairs and their heads. Raise if they do not cover all heads."""
    heads_of_pair: dict[MatrixPair, tuple[str, ...]] = {
        (setting.kv_head, setting.part): setting.heads
        for setting in sensitivity.targets
        if setting.part in ("qk", "vo")
    }
    measured = {head for (_, part), heads in heads_of_pair.items() for head in heads if part == "qk"}
    if {part for _, part in heads_of_pair} != {"qk", "vo"} or measured != set(map(str, spec.head_addresses)):
        raise ArgumentError(
            "sensitivity: bits are allocated to all heads, but some heads or one of the parts qk and vo were not measured. "
            "Measure all heads: hw.sensitivity(model, corpus)."
        )
    return list(heads_of_pair), list(heads_of_pair.values())


def _expected_cost(sensitivity: SensitivityResult, pair: MatrixPair, bits: int) -> float:
    measured = {
        entry.bits: float(drift)
        for entry, drift in zip(sensitivity.targets, sensitivity.kl_divergence, strict=True)
        if (entry.kv_head, entry.part) == pair
    }
    nearest = min(measured, key=lambda entry: (abs(entry - bits), -entry))
    return measured[nearest] * ((2 ** (nearest - 1) - 1) / (2 ** (bits - 1) - 1)) ** 2


def _matrix_shapes(spec: ModelSpec, kv_head: str, pair: str, heads: int) -> list[tuple[int, int]]:
    """Return (rows, row length) of each matrix of a pair."""
    layer = spec.attention_at(Address.parse(kv_head).layer_address)
    input_slices = layer.heads if layer.head_input == "slice" else 1
    if pair == "qk":
        return [(heads * layer.head_dim, layer.width // input_slices), (layer.head_dim, layer.kv_width // input_slices)]
    return [(layer.value_dim, layer.kv_width // input_slices), (heads * layer.width, layer.value_dim)]


def _parameter_count(spec: ModelSpec, kv_head: str, pair: str, heads: int) -> int:
    return sum(rows * row_length for rows, row_length in _matrix_shapes(spec, kv_head, pair, heads))


def _budget_usage(spec: ModelSpec, pair: MatrixPair, heads: int, bits: int, group_size: int, *, as_bytes: bool) -> int:
    """Return the budget that a pair uses: bits without scales, or bytes with scales."""
    if not as_bytes:
        return _parameter_count(spec, *pair, heads) * bits
    return sum(
        rows * row_bytes(row_length, bits, group_size) for rows, row_length in _matrix_shapes(spec, *pair, heads)
    )


def _choose_bit_indices(costs: list[list[float]], usage: list[list[int]], max_usage: float, unit: str) -> list[int]:
    """Return the index of the choice of each pair. Choices are sorted by bits, largest first."""
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
        raise ArgumentError(
            f"budget: no choice of bits fits. The smallest choice needs {total_usage:,.0f} {unit}. "
            f"Got a budget of {max_usage:,.0f} {unit}. Increase the budget, or add smaller numbers of bits to choices."
        )
    return choices


@dataclass(frozen=True)
class BitAllocationReport:
    """Loss of an allocation, of uniform bits and of random allocations, on held-out texts. Intervals are over texts.

    Attributes:
        metric: Unit of the losses.
        texts: Number of texts.
        mean_bits: Mean bits per weight of the allocation, without scales.
        counts: Number of matrix pairs for each number of bits.
        full_loss: Loss of the model before quantization.
        mixed: Loss increase of the allocation over the full model.
        uniform: Loss increase with all heads at the same bits, by bits.
        random: Loss increase of each random allocation.
        mixed_minus_random: Loss of the allocation minus the mean loss of the random allocations.
    """

    metric: str
    texts: int
    mean_bits: float
    counts: dict[int, int]
    full_loss: LossEstimate
    mixed: LossEstimate
    uniform: dict[int, LossEstimate]
    random: tuple[float, ...]
    mixed_minus_random: LossEstimate | None

    @property
    def beats_random(self) -> bool:
        """Whether the allocation increases the loss less than every random allocation."""
        return bool(self.random) and self.mixed.mean < min(self.random)

    def loss_rows(self) -> list[list[str | float]]:
        """Return rows of label, mean bits, loss increase, low and high. Random allocations: mean, minimum and maximum."""
        rows: list[list[str | float]] = [["mix", self.mean_bits, *asdict(self.mixed).values()]]
        rows += [["uniform", bits, *asdict(estimate).values()] for bits, estimate in self.uniform.items()]
        if self.random:
            mean_min_max = [float(np.mean(self.random)), min(self.random), max(self.random)]
            rows.append([f"random, {len(self.random)} mixes: mean, min, max", self.mean_bits, *mean_min_max])
        if self.mixed_minus_random is not None:
            rows.append(["mix − random", "", *asdict(self.mixed_minus_random).values()])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self, dict_factory=nan_to_none) | {"beats_random": self.beats_random}


@shows_progress
def report_allocation(
    model: ModelProtocol,
    allocation: BitAllocation,
    corpus: Any,
    *,
    other_bits: Mapping[str, int] | None = None,
    uniform: Sequence[int] = (),
    seeds: int = 10,
    basis: Basis = "given",
    progress: ProgressOption = None,
) -> BitAllocationReport:
    """Evaluate an allocation, uniform bits and random allocations on texts.

    Args:
        model: The model before quantization.
        allocation: Bits of the heads.
        corpus: Texts, preferably none of those on which the sensitivity was measured.
        other_bits: Bits of the MLPs and the vocabulary in all evaluated models, {"mlp": 8, "vocabulary": 8}.
        uniform: Numbers of bits at which all heads are evaluated for comparison.
        seeds: Number of random allocations.
        basis: Basis in which the weights of heads are quantized.
        progress: Called with a label, the work done and the total.
            None shows one line in a terminal or notebook, False nothing.

    Returns:
        Losses with 95% confidence intervals over texts.
    """
    progress = callback_of(progress)
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
            progress("quantized models", len(losses), len(bit_settings))
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
