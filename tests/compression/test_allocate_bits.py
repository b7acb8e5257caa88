"""Bits under a budget: the choice against all there are, equal cost of random mixes, and the report."""

from itertools import product

import numpy as np
import pytest

from headwise.analysis.ablation.sensitivity import Sensitivity, sensitivity
from headwise.compression.allocate_bits import _choose, allocate, report_allocation
from headwise.compression.quantize import quantise, stored
from headwise.errors import HeadwiseError
from headwise.model import Transformer
from tests.distillation.tiny import make

TEXTS = [
    "to be or not to be, that is the question",
    "whether 'tis nobler",
    "in the mind to suffer the slings and arrows",
]


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_within_the_budget_costs_less(seed: int) -> None:
    """Two choices, equal sizes: the steps that cost least are the best there are, by trying all."""
    draws = np.random.default_rng(seed)
    costs = [[0.0, float(more)] for more in draws.random(8)]
    taken = [[4, 3]] * 8
    chosen = _choose(costs, taken, 28, "bits")
    cost = sum(costs[i][place] for i, place in enumerate(chosen))
    every = [one for one in product((0, 1), repeat=8) if sum(4 - place for place in one) <= 28]
    assert cost == pytest.approx(min(sum(costs[i][place] for i, place in enumerate(one)) for one in every))


def test_a_choice_off_the_hull_is_passed_over() -> None:
    """From 8 bits to 4 costs 1 a bit, by way of 5 more at first: one step down, not two."""
    assert _choose([[0.0, 3.9, 4.0]], [[8, 5, 4]], 5, "bits") == [2]
    assert _choose([[0.0, -0.5, 4.0]], [[8, 5, 4]], 6, "bits") == [1]  # measured to fall: taken as nothing
    with pytest.raises(HeadwiseError, match="4 bits are the least, 3 were allowed"):
        _choose([[0.0, 1.0]], [[8, 4]], 3, "bits")


def found_in(drifts: dict[str, float]) -> tuple[Transformer, Sensitivity]:
    model = make(kv_heads=2, width=32)
    found = sensitivity(model, TEXTS, bits=(3,))
    for place, one in enumerate(found.settings):
        found.drifts[place] = drifts.get(f"{one.key}:{one.part}", 1.0) * found.counts
    return model, found


def test_the_costly_keep_more_bits() -> None:
    model, found = found_in({"0.1:qk": 9.0, "1.0:vo": 8.0})
    made = allocate(model, found, mean_bits=3.25, choices=(4, 3))
    assert made.counts() == {4: 2, 3: 6}  # eight pairs of equal size
    assert {part for part, bits in made.weights.items() if bits == 4} == {"0.2,0.3:qk", "1.0,1.1:vo"}
    assert made.mean_bits == 3.25
    want = 6 * 1.0 + (9.0 + 8.0) * (3 / 7) ** 2  # measured at 3 bits, at 4 by the square of the step
    assert made.expected == pytest.approx(want)


def test_random_mixes_cost_the_same() -> None:
    model, found = found_in({"0.1:qk": 9.0})
    made = allocate(model, found, mean_bits=3.5, choices=(4, 3))
    mixes = [made.shuffled(seed) for seed in range(10)]
    assert {mix.mean_bits for mix in mixes} == {made.mean_bits}
    assert len({mix.bits for mix in mixes}) > 5
    sizes = {stored(quantise(model, mix.weights))[0].bytes for mix in [made, *mixes]}
    assert len(sizes) == 1


def test_a_budget_of_bytes_is_kept() -> None:
    model, found = found_in({"0.1:qk": 9.0})
    most = stored(quantise(model, {"*": 4}))[0].bytes
    made = allocate(model, found, megabytes=most / 1e6)
    assert stored(quantise(model, made.weights))[0].bytes <= most
    with pytest.raises(HeadwiseError, match="give one budget"):
        allocate(model, found)
    with pytest.raises(HeadwiseError, match="are the least"):
        allocate(model, found, mean_bits=1.5)


def test_all_heads_must_be_measured() -> None:
    model = make()
    with pytest.raises(HeadwiseError, match="those of another model"):
        allocate(make(1), sensitivity(model, TEXTS, heads="0.*"), mean_bits=3.5)
    with pytest.raises(HeadwiseError, match="measure them all"):
        allocate(model, sensitivity(model, TEXTS, heads="0.*"), mean_bits=3.5)


def test_the_report() -> None:
    model = make()
    made = allocate(model, sensitivity(model, TEXTS), mean_bits=3.5, choices=(4, 3))
    told = report_allocation(model, made, TEXTS, uniform=(4, 3), seeds=3, basis="balanced")
    assert [row[0] for row in told.rows()][:3] == ["mix", "uniform", "uniform"]
    assert len(told.random) == 3
    assert told.outside == (told.mix.mean < min(told.random))
    assert set(told.uniform) == {4, 3}
    assert told.to_dict()["counts"] == {4: 8, 3: 8}
