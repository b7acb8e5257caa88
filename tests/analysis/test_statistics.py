"""Intervals and p-values keep their error rates: enumeration, scipy, and simulations under the null hypothesis."""

from inspect import signature
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import stats

from headwise.analysis.metrics.statistics import (
    benjamini_hochberg,
    bootstrap_difference_interval,
    bootstrap_interval,
    max_t_test,
    sign_flip_test,
)
from headwise.errors import HeadwiseError


def make_rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# The bootstrap.


def test_bootstrap_equals_quantiles_of_all_resamples() -> None:
    sums, counts = np.array([1.0, 5.0, 2.0]), np.array([2.0, 5.0, 8.0])
    ratios = [sums[list(d)].sum() / counts[list(d)].sum() for d in product(range(3), repeat=3)]
    low, high = bootstrap_interval(sums, counts, draws=40_000, level=0.8)
    assert low == pytest.approx(np.quantile(ratios, 0.1, method="inverted_cdf"), abs=0.01)
    assert high == pytest.approx(np.quantile(ratios, 0.9, method="inverted_cdf"), abs=0.01)


def test_bootstrap_equals_scipy() -> None:
    generator = make_rng(1)
    counts = generator.integers(1, 9, (23, 3)).astype(float)
    sums = generator.binomial(counts.astype(int), [0.2, 0.5, 0.9]).astype(float)
    low, high = bootstrap_interval(sums, counts, draws=6000, seed=5)
    # the argument has another name since scipy 1.15
    seeded: Any = {"rng" if "rng" in signature(stats.bootstrap).parameters else "random_state": make_rng(3)}
    for test in range(3):
        expected = stats.bootstrap(
            (sums[:, test], counts[:, test]),
            lambda s, c, axis: s.sum(axis) / c.sum(axis),
            paired=True,
            method="percentile",
            n_resamples=6000,
            **seeded,
        ).confidence_interval
        assert (low[test], high[test]) == pytest.approx((expected.low, expected.high), abs=0.015)


def test_bootstrap_interval_has_nominal_coverage() -> None:
    generator = make_rng(2)
    counts = generator.integers(1, 12, (80, 500))
    level_of_unit = generator.beta(3, 2, (80, 500))  # the rows of a unit are correlated
    sums = generator.binomial(counts, level_of_unit)
    low, high = bootstrap_interval(sums, counts)
    assert 0.915 < np.mean((low <= 0.6) & (high >= 0.6)) < 0.975


def test_bootstrap_resamples_units_not_rows() -> None:
    values = make_rng(3).normal(size=60)
    once = bootstrap_interval(values, np.ones(60))
    often = bootstrap_interval(values * 50, np.full(60, 50.0))  # fifty equal rows per unit add no information
    np.testing.assert_allclose(once, often)
    width = 2 * 1.96 * values.std() / np.sqrt(60)
    assert once[1] - once[0] == pytest.approx(width, rel=0.15)


def test_statistics_ignore_empty_units() -> None:
    generator = make_rng(4)
    sums, counts = generator.normal(size=(17, 2, 3)), np.ones((17, 2, 3))
    holes = np.sort(generator.permutation(40)[:17])
    many, many_counts = np.full((40, 2, 3), np.nan), np.zeros((40, 2, 3))
    many[holes], many_counts[holes] = sums, counts
    for dense, sparse in (
        (bootstrap_interval(sums, counts), bootstrap_interval(many, many_counts)),
        (sign_flip_test(sums, counts), sign_flip_test(many, many_counts)),
        (max_t_test(sums, 0.0, counts)[0], max_t_test(many, np.where(many_counts > 0, 0, np.nan), many_counts)[0]),
        (
            bootstrap_difference_interval(sums, counts, -sums, counts),
            bootstrap_difference_interval(many, many_counts, -many, many_counts),
        ),
    ):
        np.testing.assert_array_equal(dense, sparse)
        assert np.shape(dense)[-2:] == (2, 3)


def test_bootstrap_single_unit_has_no_interval() -> None:
    counts = np.array([[1.0, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]])
    low, high = bootstrap_interval(np.arange(12.0).reshape(4, 3), counts)
    assert np.isnan(low).tolist() == [False, True, True] == np.isnan(high).tolist()
    two, _ = bootstrap_interval(np.ones((30, 1)), np.r_[np.ones(2), np.zeros(28)][:, None] + [[0.0, 1.0]])
    assert two[0] == 1.0  # two of thirty units have counts; draws without them are ignored


def test_bootstrap_difference_is_narrower_than_unpaired() -> None:
    generator = make_rng(5)
    counts = generator.integers(3, 9, 70).astype(float)
    hard = generator.normal(0, 3, 70)  # some sentences are harder for all heads
    a, b = (hard + 0.5 + generator.normal(0, 0.3, 70)) * counts, hard * counts
    low, high = bootstrap_difference_interval(a, counts, b, counts)
    alone = bootstrap_interval(a, counts)
    assert 0.3 < low < 0.5 < high < 0.7
    assert high - low < (alone[1] - alone[0]) / 5


def test_statistics_invalid_input_raises() -> None:
    with pytest.raises(HeadwiseError, match="same shape"):
        bootstrap_interval(np.ones((3, 2)), np.ones((2, 3)))
    with pytest.raises(HeadwiseError, match="level"):
        bootstrap_interval(np.ones(3), np.ones(3), level=95)
    with pytest.raises(HeadwiseError, match="NaN or infinity"):
        sign_flip_test([np.nan, 1.0], [1, 1])
    with pytest.raises(HeadwiseError, match="0 or more"):
        sign_flip_test([1.0, 1.0], [1, -1])
    with pytest.raises(HeadwiseError, match="same number of units"):
        bootstrap_difference_interval(np.ones(3), np.ones(3), np.ones(4), np.ones(4))
    with pytest.raises(HeadwiseError, match="one entry per unit"):
        bootstrap_interval(1.0, 1.0)
    with pytest.raises(HeadwiseError, match="baselines"):
        max_t_test(np.ones((6, 2)), np.ones((5, 2)), np.ones((6, 2)))
    with pytest.raises(HeadwiseError, match="draws"):
        max_t_test(np.ones((6, 2)), 0.0, np.ones((6, 2)), draws=0)


# Sign flips.


def test_sign_flip_test_matches_hand_count() -> None:
    # Sums of at least 2: no −1 or just one of four signs of [1, 1, 1, 1] → 5 of 16; ties count.
    assert sign_flip_test([1.0, 1, 1, -1], [1] * 4) == 5 / 16
    assert sign_flip_test([-1.0, -2, -3], [1] * 3) == 1.0
    assert sign_flip_test(np.zeros((4, 1)), np.ones((4, 1))).tolist() == [1.0]
    assert sign_flip_test(np.zeros((0, 3)), np.zeros((0, 3))).tolist() == [1.0] * 3


def test_sign_flip_test_equals_scipy() -> None:
    few, many = make_rng(6).normal(0.3, 1, 9), make_rng(7).normal(0.4, 1, 14)
    for values, tolerance in ((few, 1e-12), (many, 0.02)):
        expected = stats.permutation_test(
            (values, np.zeros_like(values)),
            lambda a, b, axis: (a - b).mean(axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=1 << 20,
            alternative="greater",
        )
        assert sign_flip_test(values, np.ones(len(values))) == pytest.approx(expected.pvalue, abs=tolerance)


def test_sign_flip_test_is_calibrated() -> None:
    p = sign_flip_test(make_rng(8).standard_t(3, (40, 800)), np.ones((40, 800)), draws=999)
    for level in (0.05, 0.25, 0.5):
        assert np.mean(p <= level) == pytest.approx(level, abs=0.055)
    assert p.min() >= 1 / 1000


# Family-wise tests.


def correlated(generator: np.random.Generator, units: int, tests: int) -> np.ndarray:
    """Correlated tests of very different spread, over units of different sizes."""
    common = generator.normal(size=(units, 1))
    return (0.6 * common + generator.standard_t(5, (units, tests))) * np.geomspace(0.01, 100, tests)


def test_max_t_equals_enumeration() -> None:
    differences = make_rng(9).normal(size=(6, 3)) * [1, 10, 100]

    def statistics(signs: np.ndarray) -> np.ndarray:
        return (signs[:, None] * differences).sum(0) / np.sqrt((differences**2).sum(0))

    largest = np.array([statistics(np.array(signs)).max() for signs in product((1, -1), repeat=6)])
    expected = [np.mean(largest >= observed - 1e-12) for observed in statistics(np.ones(6))]
    p, family = max_t_test(differences + 5.0, np.full((6, 3), 5.0), np.ones((6, 3)))
    assert family == 3
    assert p == pytest.approx(np.array(expected), abs=1e-12)


def test_max_t_controls_family_wise_error() -> None:
    generator, alarms, families = make_rng(10), 0, 400
    for _ in range(families):
        p, _ = max_t_test(correlated(generator, 32, 50), 0.0, np.ones((32, 50)), draws=400)
        alarms += bool((p <= 0.05).any())
    assert 0.02 < alarms / families < 0.09  # 5%, plus or minus 3.5 standard errors


def test_max_t_finds_true_effect() -> None:
    generator, detected, false = make_rng(11), 0, 0
    for _ in range(60):
        values = correlated(generator, 64, 50)
        values[:, 20] += 0.9 * np.geomspace(0.01, 100, 50)[20]
        p, _ = max_t_test(values, 0.0, np.ones((64, 50)), draws=400)
        detected += p[20] <= 0.05
        false += bool((np.delete(p, 20) <= 0.05).any())
    assert detected >= 55
    assert false <= 9


def test_max_t_single_test_equals_sign_flip_test() -> None:
    values, counts = make_rng(12).normal(0.2, 1, (37, 5)), np.ones((37, 5))
    alone = [max_t_test(values[:, [test]], 0.0, counts[:, [test]], seed=3)[0][0] for test in range(5)]
    raw = sign_flip_test(values, counts, seed=3)
    np.testing.assert_array_equal(alone, raw)
    assert (max_t_test(values, 0.0, counts, seed=3)[0] >= raw).all()


def test_max_t_excludes_untestable_hypotheses() -> None:
    values, counts = make_rng(13).normal(2, 1, (20, 4)), np.ones((20, 4))
    values[:, 1] = 0  # no difference anywhere
    counts[4:, 2] = 0  # four units
    p, family = max_t_test(values, 0.0, counts)
    assert family == 2
    assert p[[1, 2]].tolist() == [1.0, 1.0]
    assert (p[[0, 3]] < 0.01).all()
    testable, _ = max_t_test(values[:, [0, 3]], 0.0, counts[:, [0, 3]])
    np.testing.assert_array_equal(p[[0, 3]], testable)
    nothing, none = max_t_test(np.zeros((9, 2, 2)), 0.0, np.ones((9, 2, 2)))
    assert (nothing.shape, none) == ((2, 2), 0)


def test_max_t_constant_difference_is_significant() -> None:
    p, family = max_t_test(np.ones((128, 3)), np.full((128, 3), 0.06), np.ones((128, 3)), draws=999)
    assert family == 3
    assert p.tolist() == [1 / 1000] * 3


def test_benjamini_hochberg_matches_hand_count_and_scipy() -> None:
    p = np.array([[0.001, 0.9, np.nan], [0.008, 0.039, 0.041]])
    # sorted: p·m/rank, then the minimum from there on: 0.005, 0.02, 0.05125 twice (0.041·5/4 < 0.039·5/3), 0.9
    expected = [[0.005, 0.9, np.nan], [0.02, 0.05125, 0.05125]]
    np.testing.assert_allclose(benjamini_hochberg(p), expected)
    assert benjamini_hochberg([]).shape == (0,)
    many = np.random.default_rng(0).random(77).round(1)  # with ties, 0 and 1
    np.testing.assert_allclose(benjamini_hochberg(many), stats.false_discovery_control(many))
    with pytest.raises(HeadwiseError, match="between 0 and 1"):
        benjamini_hochberg([0.1, 1.5])


# The reason to select heads on one half and report on the other.


@pytest.mark.parametrize(("arcs", "selected_rate"), [(100, 0.54), (3000, 0.426)])
def test_bootstrap_selection_bias_vanishes_on_held_out_half(arcs: int, selected_rate: float) -> None:
    chance = np.arange(arcs + 1) / arcs
    at_most = stats.binom.cdf(np.arange(arcs + 1), arcs, 0.4) ** 288
    expected = float((chance * np.diff(at_most, prepend=0)).sum())  # expected mean of the best of 288
    assert expected == pytest.approx(selected_rate, abs=0.006)
    generator, chosen, reported, fooled, honest = make_rng(16), [], [], 0, 0
    for _ in range(60):
        # 20 sentences for selection, 20 for reporting
        hits = generator.binomial(arcs // 20, 0.4, (40, 288)).astype(float)
        counts = np.full((20, 1), arcs / 20)
        best = hits[0::2].sum(0).argmax()
        chosen.append(hits[0::2, best].sum() / arcs)
        reported.append(hits[1::2, best].sum() / arcs)
        fooled += bootstrap_interval(hits[0::2, [best]], counts)[0][0] > 0.4
        honest += bootstrap_interval(hits[1::2, [best]], counts)[0][0] > 0.4
    assert np.mean(chosen) == pytest.approx(selected_rate, abs=0.012)
    assert np.mean(reported) == pytest.approx(0.4, abs=4 * (0.24 / arcs / 60) ** 0.5)
    assert fooled >= 55
    assert honest <= 8
