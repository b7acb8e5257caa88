"""The rule on figures made by hand, statistics against closed forms, and tiny models measured."""

from dataclasses import replace

import numpy as np
import pytest

from headwise.errors import HeadwiseError
from headwise.experiments.claim_tests import quantization_coupling
from headwise.experiments.claim_tests.quantization_coupling import (
    CLAIM,
    COUPLING,
    KEY_VALUE,
    SPREAD,
    SYNTHETIC_MODELS,
    QuantizationCosts,
    additivity,
    cost_variation_between_heads,
    head_pair_interaction,
    key_to_value_drift_log2_ratio,
    measure_model,
    query_heads_by_kv,
    sample_kv_heads,
    single_and_pair_quantization_costs,
)
from headwise.experiments.engine.statistic import Statistic
from tests.distillation.tiny import make_model
from tests.experiments.tiny import tiny_experiment

CLEARLY_ABOVE, NEAR_ZERO, WIDE_INTERVAL = [0.9, 0.91, 0.92], [0.01, 0.011, 0.012], [0.0, 0.3, 1.2]
VALUES = [-0.9, -0.91, -0.92]  # cached values drift further: keys are unlike values all the same


def rows(*values_by_name):
    return [
        (name, SYNTHETIC_MODELS, values)
        for name, values in zip((SPREAD, COUPLING, KEY_VALUE), values_by_name, strict=True)
    ]


CASES = {
    "holds": rows(CLEARLY_ABOVE, CLEARLY_ABOVE, VALUES),
    "does not hold": rows(CLEARLY_ABOVE, NEAR_ZERO, NEAR_ZERO),
    "depends": rows(CLEARLY_ABOVE, NEAR_ZERO, CLEARLY_ABOVE),
}


def test_quantization_claim_depends_names_reason() -> None:
    statistics = quantization_coupling.StatisticTable()
    for name, position, values in rows(CLEARLY_ABOVE, WIDE_INTERVAL, CLEARLY_ABOVE):
        statistics.add(name, position, values)
    assert str(CLAIM.judge(statistics)).startswith("undecided: shown: heads uneven (little models)")


def make_costs(n: int = 40, noise: float = 0.0) -> QuantizationCosts:
    """Four heads that cost 1, 2, 3 and 4 a token; pairs cost a quarter more than both alone; keys three times values."""
    rng = np.random.default_rng(3)
    counts = rng.integers(5, 20, n).astype(float)
    pair_indices = np.array([(a, b) for a in range(4) for b in range(a + 1, 4)])
    singles = np.arange(1.0, 5.0)[:, None] * counts + noise * rng.normal(size=(4, n)) * counts
    pairs = 1.25 * (singles[pair_indices[:, 0]] + singles[pair_indices[:, 1]])
    values = np.broadcast_to(counts, (4, n))
    return QuantizationCosts(singles, singles, pairs, pair_indices, 2 * singles.sum(0), 3 * values, values, counts)


def test_quantization_statistics_equal_closed_forms() -> None:
    costs, weights = make_costs(), np.ones(40)
    assert cost_variation_between_heads(costs, weights) == pytest.approx(np.std([1, 2, 3, 4], ddof=1) / 2.5)
    assert head_pair_interaction(costs, weights) == pytest.approx(0.25)
    assert key_to_value_drift_log2_ratio(costs, weights) == pytest.approx(np.log2(3))
    assert additivity(costs, weights) == pytest.approx(2)
    statistic = costs.bootstrap_statistic(cost_variation_between_heads)
    assert statistic.low == pytest.approx(statistic.high)  # texts all say the same


def test_cost_spread_excludes_text_variation() -> None:
    """Equal heads on different texts: the plain spread of their means is far from 0, the corrected spread is not."""
    n = 400
    rng = np.random.default_rng(0)
    drifts = rng.normal(1, 3, size=(16, n))
    costs = replace(make_costs(n), drifts=drifts, counts=np.ones(n))
    plain = drifts.mean(1)
    assert plain.std(ddof=1) / plain.mean() > 0.1
    statistic = costs.bootstrap_statistic(cost_variation_between_heads)
    assert statistic.mean < 0.15
    assert statistic.is_interval_below(quantization_coupling.MIN_SPREAD)
    uneven = replace(costs, drifts=drifts + np.arange(16)[:, None])
    assert cost_variation_between_heads(uneven, np.ones(n)) == pytest.approx(
        np.std(np.arange(16), ddof=1) / 8.5, rel=0.1
    )


def test_coupling_excludes_noise() -> None:
    rng, n = np.random.default_rng(1), 400
    costs = replace(make_costs(n), counts=np.ones(n))
    sum_of_singles = costs.singles[costs.pair_heads[:, 0]] + costs.singles[costs.pair_heads[:, 1]]
    noisy = replace(costs, pairs=sum_of_singles + rng.normal(0, 5, size=sum_of_singles.shape))
    assert head_pair_interaction(noisy, np.ones(n)) < 0.05
    assert noisy.bootstrap_statistic(head_pair_interaction).is_interval_below(quantization_coupling.MIN_COUPLING)


def test_drawn_keys_samples_kv_groups_together() -> None:
    model = make_model(kv_heads=2)
    assert query_heads_by_kv(model)["1.1"] == ("1.2", "1.3")
    assert sample_kv_heads(model, 8) == ["0.0", "0.1", "1.0", "1.1"]
    sampled = sample_kv_heads(model, 5)
    assert len(sampled) == 2, "the heads of two key heads are four, of three six"
    assert sample_kv_heads(model, 5) == sampled
    assert {tuple(sample_kv_heads(model, 5, seed)) for seed in range(20)} != {tuple(sampled)}


def test_quantization_claim_tiny_experiment_gives_statistics(tmp_path) -> None:
    experiment = tiny_experiment(tmp_path, (0, 1))
    statistics = CLAIM.measure(experiment)
    costs = single_and_pair_quantization_costs(
        experiment.train_or_load(experiment.make_config(1)).load_model(), experiment.held_out_corpus(1)
    )
    for name, statistic in quantization_coupling.COST_STATISTICS.items():
        assert statistics[name, SYNTHETIC_MODELS].values[1] == pytest.approx(
            statistic(costs, np.ones(len(costs.counts))), nan_ok=True
        )
    assert CLAIM.correct_and_judge(statistics)[1].word in CLAIM.possible_verdicts


def test_quantization_claim_given_model_gives_statistics() -> None:
    model = make_model(kv_heads=2)
    texts = ["to be or not to be", "that is the question", "whether it is nobler", "in the mind to suffer"]
    statistics = measure_model(model, texts)
    assert isinstance(statistics[COUPLING, "given"], Statistic)
    assert statistics[SPREAD, "given"].low is not None
    with pytest.raises(HeadwiseError, match="at least four texts"):
        measure_model(model, texts[:3])
