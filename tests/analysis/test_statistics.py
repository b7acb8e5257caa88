"""Intervals and p-values hold what they promise: against enumeration, scipy, and simulations under the null."""

from inspect import signature
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from scipy import stats

from headwise.analysis.metrics.statistics import (
    benjamini_hochberg,
    bootstrap,
    bootstrap_difference,
    max_t,
    permute_in_strata,
    sign_flips,
)
from headwise.errors import HeadwiseError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# The bootstrap.


def test_bootstrap_has_the_quantiles_of_all_draws() -> None:
    sums, counts = np.array([1.0, 5.0, 2.0]), np.array([2.0, 5.0, 8.0])
    ratios = [sums[list(d)].sum() / counts[list(d)].sum() for d in product(range(3), repeat=3)]
    low, high = bootstrap(sums, counts, draws=40_000, level=0.8)
    assert low == pytest.approx(np.quantile(ratios, 0.1, method="inverted_cdf"), abs=0.01)
    assert high == pytest.approx(np.quantile(ratios, 0.9, method="inverted_cdf"), abs=0.01)


def test_bootstrap_agrees_with_scipy() -> None:
    dice = rng(1)
    counts = dice.integers(1, 9, (23, 3)).astype(float)
    sums = dice.binomial(counts.astype(int), [0.2, 0.5, 0.9]).astype(float)
    low, high = bootstrap(sums, counts, draws=6000, seed=5)
    # as scipy has it: another name since 1.15
    seeded: Any = {"rng" if "rng" in signature(stats.bootstrap).parameters else "random_state": rng(3)}
    for test in range(3):
        theirs = stats.bootstrap(
            (sums[:, test], counts[:, test]),
            lambda s, c, axis: s.sum(axis) / c.sum(axis),
            paired=True,
            method="percentile",
            n_resamples=6000,
            **seeded,
        ).confidence_interval
        assert (low[test], high[test]) == pytest.approx((theirs.low, theirs.high), abs=0.015)


def test_bootstrap_covers() -> None:
    dice = rng(2)
    counts = dice.integers(1, 12, (80, 500))
    level_of_unit = dice.beta(3, 2, (80, 500))  # rows of a unit lean on each other
    sums = dice.binomial(counts, level_of_unit)
    low, high = bootstrap(sums, counts)
    assert 0.915 < np.mean((low <= 0.6) & (high >= 0.6)) < 0.975


def test_bootstrap_draws_units_not_rows() -> None:
    values = rng(3).normal(size=60)
    once = bootstrap(values, np.ones(60))
    often = bootstrap(values * 50, np.full(60, 50.0))  # fifty rows a unit, all the same: no more is known
    np.testing.assert_allclose(once, often)
    width = 2 * 1.96 * values.std() / np.sqrt(60)
    assert once[1] - once[0] == pytest.approx(width, rel=0.15)


def test_empty_units_change_nothing() -> None:
    dice = rng(4)
    sums, counts = dice.normal(size=(17, 2, 3)), np.ones((17, 2, 3))
    holes = np.sort(dice.permutation(40)[:17])
    many, many_counts = np.full((40, 2, 3), np.nan), np.zeros((40, 2, 3))
    many[holes], many_counts[holes] = sums, counts
    for ours, theirs in (
        (bootstrap(sums, counts), bootstrap(many, many_counts)),
        (sign_flips(sums, counts), sign_flips(many, many_counts)),
        (max_t(sums, 0.0, counts)[0], max_t(many, np.where(many_counts > 0, 0, np.nan), many_counts)[0]),
        (
            bootstrap_difference(sums, counts, -sums, counts),
            bootstrap_difference(many, many_counts, -many, many_counts),
        ),
    ):
        np.testing.assert_array_equal(ours, theirs)
        assert np.shape(ours)[-2:] == (2, 3)


def test_a_test_with_one_unit_has_no_interval() -> None:
    counts = np.array([[1.0, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]])
    low, high = bootstrap(np.arange(12.0).reshape(4, 3), counts)
    assert np.isnan(low).tolist() == [False, True, True] == np.isnan(high).tolist()
    two, _ = bootstrap(np.ones((30, 1)), np.r_[np.ones(2), np.zeros(28)][:, None] + [[0.0, 1.0]])
    assert two[0] == 1.0  # two units of thirty: draws that meet neither are passed over


def test_paired_intervals_are_narrower() -> None:
    dice = rng(5)
    counts = dice.integers(3, 9, 70).astype(float)
    hard = dice.normal(0, 3, 70)  # some sentences are harder for everybody
    a, b = (hard + 0.5 + dice.normal(0, 0.3, 70)) * counts, hard * counts
    low, high = bootstrap_difference(a, counts, b, counts)
    alone = bootstrap(a, counts)
    assert 0.3 < low < 0.5 < high < 0.7
    assert high - low < (alone[1] - alone[0]) / 5


def test_bad_input_is_refused() -> None:
    with pytest.raises(HeadwiseError, match="both are"):
        bootstrap(np.ones((3, 2)), np.ones((2, 3)))
    with pytest.raises(HeadwiseError, match="level"):
        bootstrap(np.ones(3), np.ones(3), level=95)
    with pytest.raises(HeadwiseError, match="finite"):
        sign_flips([np.nan, 1.0], [1, 1])
    with pytest.raises(HeadwiseError, match="0 or more"):
        sign_flips([1.0, 1.0], [1, -1])
    with pytest.raises(HeadwiseError, match="same units"):
        bootstrap_difference(np.ones(3), np.ones(3), np.ones(4), np.ones(4))
    with pytest.raises(HeadwiseError, match="axis of units"):
        bootstrap(1.0, 1.0)
    with pytest.raises(HeadwiseError, match="nulls"):
        max_t(np.ones((6, 2)), np.ones((5, 2)), np.ones((6, 2)))
    with pytest.raises(HeadwiseError, match="draws"):
        max_t(np.ones((6, 2)), 0.0, np.ones((6, 2)), draws=0)


# Sign flips.


def test_sign_flips_by_hand() -> None:
    # Sums of at least 2: no −1 or just one of four signs of [1, 1, 1, 1] → 5 of 16; ties count.
    assert sign_flips([1.0, 1, 1, -1], [1] * 4) == 5 / 16
    assert sign_flips([-1.0, -2, -3], [1] * 3) == 1.0
    assert sign_flips(np.zeros((4, 1)), np.ones((4, 1))).tolist() == [1.0]
    assert sign_flips(np.zeros((0, 3)), np.zeros((0, 3))).tolist() == [1.0] * 3


def test_sign_flips_agree_with_scipy() -> None:
    few, many = rng(6).normal(0.3, 1, 9), rng(7).normal(0.4, 1, 14)
    for values, tolerance in ((few, 1e-12), (many, 0.02)):
        theirs = stats.permutation_test(
            (values, np.zeros_like(values)),
            lambda a, b, axis: (a - b).mean(axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=1 << 20,
            alternative="greater",
        )
        assert sign_flips(values, np.ones(len(values))) == pytest.approx(theirs.pvalue, abs=tolerance)


def test_sign_flips_are_calibrated() -> None:
    p = sign_flips(rng(8).standard_t(3, (40, 800)), np.ones((40, 800)), draws=999)
    for level in (0.05, 0.25, 0.5):
        assert np.mean(p <= level) == pytest.approx(level, abs=0.055)
    assert p.min() >= 1 / 1000


# The whole family.


def correlated(dice: np.random.Generator, units: int, tests: int) -> np.ndarray:
    """Tests that lean on each other, of very different spread, over units of different sizes."""
    common = dice.normal(size=(units, 1))
    return (0.6 * common + dice.standard_t(5, (units, tests))) * np.geomspace(0.01, 100, tests)


def test_max_t_by_enumeration() -> None:
    differences = rng(9).normal(size=(6, 3)) * [1, 10, 100]

    def statistics(signs: np.ndarray) -> np.ndarray:
        return (signs[:, None] * differences).sum(0) / np.sqrt((differences**2).sum(0))

    largest = np.array([statistics(np.array(signs)).max() for signs in product((1, -1), repeat=6)])
    expected = [np.mean(largest >= seen - 1e-12) for seen in statistics(np.ones(6))]
    p, family = max_t(differences + 5.0, np.full((6, 3), 5.0), np.ones((6, 3)))
    assert family == 3
    assert p == pytest.approx(np.array(expected), abs=1e-12)


def test_max_t_keeps_the_family_wise_error() -> None:
    dice, alarms, families = rng(10), 0, 400
    for _ in range(families):
        p, _ = max_t(correlated(dice, 32, 50), 0.0, np.ones((32, 50)), draws=400)
        alarms += bool((p <= 0.05).any())
    assert 0.02 < alarms / families < 0.09  # 5 %, give or take 3.5 standard errors


def test_max_t_finds_what_is_there() -> None:
    dice, found, false = rng(11), 0, 0
    for _ in range(60):
        values = correlated(dice, 64, 50)
        values[:, 20] += 0.9 * np.geomspace(0.01, 100, 50)[20]
        p, _ = max_t(values, 0.0, np.ones((64, 50)), draws=400)
        found += p[20] <= 0.05
        false += bool((np.delete(p, 20) <= 0.05).any())
    assert found >= 55
    assert false <= 9


def test_max_t_of_one_test_is_the_sign_flip_test() -> None:
    values, counts = rng(12).normal(0.2, 1, (37, 5)), np.ones((37, 5))
    alone = [max_t(values[:, [test]], 0.0, counts[:, [test]], seed=3)[0][0] for test in range(5)]
    raw = sign_flips(values, counts, seed=3)
    np.testing.assert_array_equal(alone, raw)
    assert (max_t(values, 0.0, counts, seed=3)[0] >= raw).all()


def test_what_cannot_be_tested_is_not_in_the_family() -> None:
    values, counts = rng(13).normal(2, 1, (20, 4)), np.ones((20, 4))
    values[:, 1] = 0  # no difference anywhere
    counts[4:, 2] = 0  # four units
    p, family = max_t(values, 0.0, counts)
    assert family == 2
    assert p[[1, 2]].tolist() == [1.0, 1.0]
    assert (p[[0, 3]] < 0.01).all()
    kept, _ = max_t(values[:, [0, 3]], 0.0, counts[:, [0, 3]])
    np.testing.assert_array_equal(p[[0, 3]], kept)
    nothing, none = max_t(np.zeros((9, 2, 2)), 0.0, np.ones((9, 2, 2)))
    assert (nothing.shape, none) == ((2, 2), 0)


def test_a_perfect_head_needs_no_variance() -> None:
    p, family = max_t(np.ones((128, 3)), np.full((128, 3), 0.06), np.ones((128, 3)), draws=999)
    assert family == 3
    assert p.tolist() == [1 / 1000] * 3


def test_false_discoveries() -> None:
    p = np.array([[0.001, 0.9, np.nan], [0.008, 0.039, 0.041]])
    # sorted: p·m/rank, the smallest from there on: .005, .02, .05125 twice (.041·5/4 < .039·5/3), .9
    expected = [[0.005, 0.9, np.nan], [0.02, 0.05125, 0.05125]]
    np.testing.assert_allclose(benjamini_hochberg(p), expected)
    assert benjamini_hochberg([]).shape == (0,)
    many = np.random.default_rng(0).random(77).round(1)  # with equals, 0 and 1
    np.testing.assert_allclose(benjamini_hochberg(many), stats.false_discovery_control(many))
    with pytest.raises(HeadwiseError, match="0-1"):
        benjamini_hochberg([0.1, 1.5])


# Inside strata.


def test_strata_by_enumeration() -> None:
    values = np.array([3.0, 1, 0.5, 2, 9, 7, 8.5])
    labels, strata = [1, 0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 2, 2, 2]

    def excess(first: tuple[int, ...], second: tuple[int, ...]) -> float:
        arcs = sum(values[i] - values[[j for j in range(4) if j not in first]].mean() for i in first)
        arcs += sum(values[i] - values[[j for j in range(4, 7) if j not in second]].mean() for i in second)
        return arcs / 3

    every = [excess(a, b) for a in combinations(range(4), 2) for b in combinations(range(4, 7), 1)]
    seen = excess((0, 3), (4,))
    made = permute_in_strata(values, labels, strata, draws=20_000)
    assert made.excess == pytest.approx(seen)
    assert made.p == pytest.approx(np.mean(np.array(every) >= seen - 1e-12), abs=0.01)


def test_a_positional_head_has_no_excess() -> None:
    dice = rng(14)
    offsets, arcs = dice.integers(-5, 6, 600), dice.random(600) < 0.2
    hard = (offsets == 1).astype(float)  # all on the previous word, whatever the words
    noisy = hard + 0.1 * dice.normal(size=600)
    skilled = noisy + 0.1 * arcs
    made = permute_in_strata(np.stack((hard, noisy, skilled), 1), arcs, offsets)
    assert made.excess[0] == pytest.approx(0, abs=1e-12)
    assert made.p[0] == 1.0
    assert made.p[1] > 0.01
    assert made.p[2] == 1 / 2001
    assert made.excess[2] == pytest.approx(0.1, abs=0.03)


def test_strata_that_compare_nothing_are_left_out() -> None:
    made = permute_in_strata([5.0, 1, 1, 100, 50, 3], [1, 0, 0, 1, 1, 0], [1, 1, 1, 2, 2, 3])
    assert (float(made.excess), made.coverage) == (4.0, 1 / 3)
    nothing = permute_in_strata(np.ones((2, 3)), [1, 0], [1, 2])
    assert np.isnan(nothing.excess).all()
    assert nothing.p.tolist() == [1.0] * 3
    assert nothing.coverage == 0
    with pytest.raises(HeadwiseError, match="one entry per item"):
        permute_in_strata([1.0, 2.0], [1], [1, 1])


def test_strata_are_calibrated() -> None:
    dice = rng(15)
    offsets = dice.integers(0, 6, 240)
    arcs = dice.random(240) < 0.1 + 0.1 * offsets  # arcs prefer some offsets, and so do heads
    values = offsets[:, None] ** 2 + dice.exponential(size=(240, 600))
    p = permute_in_strata(values, arcs, offsets, draws=999).p
    assert np.mean(p <= 0.05) == pytest.approx(0.05, abs=0.035)
    assert np.mean(p <= 0.5) == pytest.approx(0.5, abs=0.07)


# Why heads are chosen on one half and reported on the other.


@pytest.mark.parametrize(("arcs", "shown"), [(100, 0.54), (3000, 0.426)])
def test_choosing_makes_heads_look_skilled(arcs: int, shown: float) -> None:
    chance = np.arange(arcs + 1) / arcs
    at_most = stats.binom.cdf(np.arange(arcs + 1), arcs, 0.4) ** 288
    expected = float((chance * np.diff(at_most, prepend=0)).sum())  # the mean of the best of 288
    assert expected == pytest.approx(shown, abs=0.006)
    dice, chosen, reported, fooled, honest = rng(16), [], [], 0, 0
    for _ in range(60):
        hits = dice.binomial(arcs // 20, 0.4, (40, 288)).astype(float)  # 20 sentences for choosing, 20 for reporting
        counts = np.full((20, 1), arcs / 20)
        best = hits[0::2].sum(0).argmax()
        chosen.append(hits[0::2, best].sum() / arcs)
        reported.append(hits[1::2, best].sum() / arcs)
        fooled += bootstrap(hits[0::2, [best]], counts)[0][0] > 0.4
        honest += bootstrap(hits[1::2, [best]], counts)[0][0] > 0.4
    assert np.mean(chosen) == pytest.approx(shown, abs=0.012)
    assert np.mean(reported) == pytest.approx(0.4, abs=4 * (0.24 / arcs / 60) ** 0.5)
    assert fooled >= 55
    assert honest <= 8
