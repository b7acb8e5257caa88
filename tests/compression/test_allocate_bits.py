"""Bit allocation under a budget: comparison with brute force, random allocations of equal size, and the report."""

from itertools import product

import numpy as np
import pytest

from headwise.analysis.ablation.quantization_sensitivity import SensitivityResult, sensitivity
from headwise.compression.allocate_bits import _choose_bit_indices, allocate_bits, report_allocation
from headwise.compression.quantize import quantize, weight_footprints
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from tests.distillation.tiny import make_model

TEXTS = [
    "to be or not to be, that is the question",
    "whether 'tis nobler",
    "in the mind to suffer the slings and arrows",
]


@pytest.mark.parametrize("seed", range(5))
def test_choose_two_options_is_optimal(seed: int) -> None:
    """With two choices and equal sizes, the cheapest steps are optimal, as brute force shows."""
    rng = np.random.default_rng(seed)
    costs = [[0.0, float(cost_increase)] for cost_increase in rng.random(8)]
    sizes = [[4, 3]] * 8
    chosen = _choose_bit_indices(costs, sizes, 28, "bits")
    cost = sum(costs[i][option] for i, option in enumerate(chosen))
    feasible = [options for options in product((0, 1), repeat=8) if sum(4 - option for option in options) <= 28]
    assert cost == pytest.approx(min(sum(costs[i][option] for i, option in enumerate(options)) for options in feasible))


def test_choose_skips_options_off_the_convex_hull() -> None:
    """From 8 bits to 4 costs 1 per bit, via 5 bits more at first: one step down, not two."""
    assert _choose_bit_indices([[0.0, 3.9, 4.0]], [[8, 5, 4]], 5, "bits") == [2]
    assert _choose_bit_indices([[0.0, -0.5, 4.0]], [[8, 5, 4]], 6, "bits") == [1]  # a falling cost counts as 0
    with pytest.raises(HeadwiseError, match="Got a budget of 3 bits"):
        _choose_bit_indices([[0.0, 1.0]], [[8, 4]], 3, "bits")


def make_sensitivity(drifts: dict[str, float]) -> tuple[Transformer, SensitivityResult]:
    model = make_model(kv_heads=2, width=32)
    result = sensitivity(model, TEXTS, bits=(3,))
    for index, setting in enumerate(result.targets):
        result.kl_sums[index] = drifts.get(f"{setting.kv_head}:{setting.part}", 1.0) * result.counts
    return model, result


def test_allocate_bits_sensitive_parts_get_more_bits() -> None:
    model, costs = make_sensitivity({"0.1:qk": 9.0, "1.0:vo": 8.0})
    allocation = allocate_bits(model, costs, mean_bits=3.25, choices=(4, 3))
    assert allocation.parts_per_bits() == {4: 2, 3: 6}  # eight pairs of equal size
    assert {part for part, bits in allocation.bits_by_head_and_part.items() if bits == 4} == {
        "0.2,0.3:qk",
        "1.0,1.1:vo",
    }
    assert allocation.mean_bits == 3.25
    expected = 6 * 1.0 + (9.0 + 8.0) * (3 / 7) ** 2  # extrapolated from 3 bits to 4 by the square of the step
    assert allocation.expected_cost == pytest.approx(expected)


def test_allocation_shuffled_has_equal_size() -> None:
    model, costs = make_sensitivity({"0.1:qk": 9.0})
    allocation = allocate_bits(model, costs, mean_bits=3.5, choices=(4, 3))
    mixes = [allocation.shuffled(seed) for seed in range(10)]
    assert {mix.mean_bits for mix in mixes} == {allocation.mean_bits}
    assert len({mix.bits for mix in mixes}) > 5
    sizes = {weight_footprints(quantize(model, mix.bits_by_head_and_part))[0].nbytes for mix in [allocation, *mixes]}
    assert len(sizes) == 1


def test_allocate_bits_megabytes_budget_is_respected() -> None:
    model, costs = make_sensitivity({"0.1:qk": 9.0})
    max_bytes = weight_footprints(quantize(model, {"*": 4}))[0].nbytes
    allocation = allocate_bits(model, costs, megabytes=max_bytes / 1e6)
    assert weight_footprints(quantize(model, allocation.bits_by_head_and_part))[0].nbytes <= max_bytes
    with pytest.raises(HeadwiseError, match="exactly one budget"):
        allocate_bits(model, costs)
    with pytest.raises(HeadwiseError, match="no choice of bits fits"):
        allocate_bits(model, costs, mean_bits=1.5)


def test_allocate_bits_missing_heads_raises() -> None:
    model = make_model()
    with pytest.raises(HeadwiseError, match="another model"):
        allocate_bits(make_model(1), sensitivity(model, TEXTS, heads="0.*"), mean_bits=3.5)
    with pytest.raises(HeadwiseError, match="Measure all heads"):
        allocate_bits(model, sensitivity(model, TEXTS, heads="0.*"), mean_bits=3.5)


def test_report_allocation_compares_uniform_and_random() -> None:
    model = make_model()
    allocation = allocate_bits(model, sensitivity(model, TEXTS), mean_bits=3.5, choices=(4, 3))
    result = report_allocation(model, allocation, TEXTS, uniform=(4, 3), seeds=3, basis="balanced")
    assert [row[0] for row in result.loss_rows()][:3] == ["mix", "uniform", "uniform"]
    assert len(result.random) == 3
    assert result.beats_random == (result.mixed.mean < min(result.random))
    assert set(result.uniform) == {4, 3}
    assert result.to_dict()["counts"] == {4: 8, 3: 8}
