"""Random plans: baselines of equal size with random heads and bits."""

from collections import Counter

import pytest

from headwise.compression import PruneRequest
from headwise.compression.plan import apply, plan_pruning
from headwise.compression.plan_report import _all_head_bits, apply_random_compression, report
from headwise.compression.quantize import quantize
from tests.distillation import tiny


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_random_plan_bits_have_equal_size(kv_heads: int) -> None:
    model = tiny.make_model(kv_heads=kv_heads)
    weights = {"0.0,0.1": 3, "1.2,1.3:qk": 2, "mlp": 8}
    quantized = apply(plan_pruning(model, weights=weights), model)
    random_specs = [apply_random_compression(model, quantized.spec, None, seed).spec for seed in range(6)]
    assert all(spec.weight_bytes() == quantized.spec.weight_bytes() for spec in random_specs)
    assert len({spec.weight_rules for spec in random_specs}) > 1
    assert all(spec.bits_and_group_size("mlp")[0] == 8 for spec in random_specs)
    result = report(model, quantized, ["to be or not to be", "that is the question"], seeds=2, repeats=1)
    assert len(result.random) == 2
    assert report(model, quantize(model, 4), ["to be or not", "to be at all"], seeds=2, repeats=1).random == ()


def test_random_plan_prunes_and_shuffles_bits() -> None:
    model = tiny.make_model(kv_heads=2)
    planned = apply(
        plan_pruning(
            model, PruneRequest(heads="0.0,1.3", fold_mean=False), weights={"0.*": 4, "1.1": 2}, cache={"1.*": 8}
        ),
        model,
    )
    other = apply_random_compression(model, planned.spec, None, 1)
    assert len(other.spec.head_addresses) == len(planned.spec.head_addresses) == 6
    counts = [Counter(_all_head_bits(candidate.spec)) for candidate in (planned, other)]
    assert counts[0] == counts[1]
