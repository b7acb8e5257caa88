"""What a plan is compared with: another of equal cost, its heads and bits drawn."""

from collections import Counter

import pytest

from headwise.compression.plan import Plan
from headwise.compression.quantize import quantise
from headwise.compression.report import _bits_of_heads, random_plan, report
from tests.distillation import tiny


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_bits_are_dealt_out_anew_at_equal_cost(kv_heads: int) -> None:
    model = tiny.make(kv_heads=kv_heads)
    weights = {"0.0,0.1": 3, "1.2,1.3:qk": 2, "mlp": 8}
    packed = Plan.make(model, weights=weights).apply(model)
    drawn = [random_plan(model, packed.spec, None, seed).spec for seed in range(6)]
    assert all(spec.weight_bytes() == packed.spec.weight_bytes() for spec in drawn)
    assert len({spec.weights for spec in drawn}) > 1
    assert all(spec.bits_of("mlp")[0] == 8 for spec in drawn)
    told = report(model, packed, ["to be or not to be", "that is the question"], seeds=2, turns=1)
    assert len(told.random) == 2
    assert report(model, quantise(model, 4), ["to be or not", "to be at all"], seeds=2, turns=1).random == ()


def test_heads_are_cut_and_bits_dealt_out_in_one_random_plan() -> None:
    model = tiny.make(kv_heads=2)
    both = Plan.make(model, cut="0.0,1.3", weights={"0.*": 4, "1.1": 2}, cache={"1.*": 8}, fold=False).apply(model)
    other = random_plan(model, both.spec, None, 1)
    assert len(other.spec.addresses) == len(both.spec.addresses) == 6
    counts = [Counter(_bits_of_heads(one.spec)) for one in (both, other)]
    assert counts[0] == counts[1]
