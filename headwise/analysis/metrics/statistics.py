"""Confidence intervals and p-values from sums and counts per sampling unit.

Units are sentences, documents, or buckets of them, and are the first axis of all arrays. Tokens of one sentence are not
independent, so resampling tokens would give intervals that are too narrow. All other axes are tests (heads, metrics), which
use the same resamples.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import ArrayLike

from headwise.errors import ArgumentError

MIN_UNITS = 5  # minimum number of units of a test
MAX_CELLS = 1 << 22  # maximum number of values in memory: draws × tests

Interval = tuple[np.ndarray, np.ndarray]


def bootstrap_interval(
    sums: ArrayLike, counts: ArrayLike, *, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Compute bootstrap percentile intervals of Σ sums / Σ counts, resampling units.

    Args:
        sums: Sums over the rows of each unit, (units, tests…).
        counts: Number of rows of each unit, (units, tests…). Units that are empty in every test are ignored.
        draws: Number of resamples.
        seed: Seed of the random generator.
        level: Confidence level.

    Returns:
        Lower and upper ends, (tests…) each. NaN for tests with fewer than two units.

    >>> low, high = bootstrap_interval([[1.], [3.], [2.], [2.]], [[4.], [4.], [4.], [4.]])
    >>> float(low[0]), float(high[0])
    (0.3125, 0.6875)
    """
    sums, counts = _validated_sums_and_counts(sums, counts)
    (sums, counts), shape = _flatten_test_axes([sums, counts], counts > 0)
    enough = (counts > 0).sum(0) >= 2
    return _interval(
        lambda times, tests: _ratio(times @ sums[:, tests], times @ counts[:, tests]),
        enough,
        sums,
        shape,
        draws,
        seed,
        level,
    )


def bootstrap_difference_interval(
    sums_a: ArrayLike,
    counts_a: ArrayLike,
    sums_b: ArrayLike,
    counts_b: ArrayLike,
    *,
    draws: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Compute paired bootstrap intervals of the difference of two ratios, Σ sums_a / Σ counts_a − Σ sums_b / Σ counts_b.

    Args:
        sums_a: Sums over the rows of each unit, (units, tests…).
        counts_a: Number of rows of each unit, (units, tests…).
        sums_b: Sums of the second ratio over the same units.
        counts_b: Number of rows of the second ratio.
        draws: Number of resamples. Both ratios use the same resampled units.
        seed: Seed of the random generator.
        level: Confidence level.

    Returns:
        Lower and upper ends, (tests…) each. NaN for tests with fewer than two units.

    >>> low, high = bootstrap_difference_interval([3., 1., 2.], [4., 4., 4.], [2., 0., 1.], [4., 4., 4.])
    >>> round(float(low), 4), round(float(high), 4)
    (0.25, 0.25)
    """
    sums_a, counts_a = _validated_sums_and_counts(sums_a, counts_a)
    sums_b, counts_b = _validated_sums_and_counts(sums_b, counts_b)
    if len(sums_a) != len(sums_b):
        raise ArgumentError(
            "sums_a, sums_b: must have the same number of units (entries of the first axis, such as texts), because the "
            f"difference is paired. Got {len(sums_a)} and {len(sums_b)} units."
        )
    sums_a, counts_a, sums_b, counts_b = np.broadcast_arrays(sums_a, counts_a, sums_b, counts_b)
    arrays, shape = _flatten_test_axes([sums_a, counts_a, sums_b, counts_b], (counts_a > 0) | (counts_b > 0))
    enough = ((arrays[1] > 0).sum(0) >= 2) & ((arrays[3] > 0).sum(0) >= 2)

    def difference(times: np.ndarray, tests: slice) -> np.ndarray:
        a, of_a, b, of_b = (times @ array[:, tests] for array in arrays)
        return _ratio(a, of_a) - _ratio(b, of_b)

    return _interval(difference, enough, arrays[0], shape, draws, seed, level)


def sign_flip_test(differences: ArrayLike, counts: ArrayLike, *, draws: int = 2000, seed: int = 0) -> np.ndarray:
    """Test whether the mean difference is above 0 with a one-sided sign-flip permutation test.

    Under the null hypothesis the sum of a unit is as likely to be −x as x. p = (b + 1)/(B + 1), where b of B sign flips reach
    the observed sum. If there are at most `draws` possible flips, all are used and p is exact.

    Args:
        differences: Sums of differences over the rows of each unit, (units, tests…).
        counts: Number of rows of each unit, (units, tests…).
        draws: Maximum number of sign flips.
        seed: Seed of the random generator.

    Returns:
        p-values, (tests…).

    >>> float(sign_flip_test([1., 2., 3.], [1, 1, 1]))  # only 1 of the 8 sign patterns, the data itself, reaches 6
    0.125
    """
    differences, counts = _validated_sums_and_counts(differences, counts)
    (differences, _), shape = _flatten_test_axes([differences, counts], counts > 0)
    observed = differences.sum(0)
    threshold = observed - _rounding_tolerance(differences)
    flips = _flips(len(differences), draws, seed)
    exceed_counts = np.zeros(len(observed))
    for tests in _chunks(len(observed), len(flips)):
        exceed_counts[tests] = (flips @ differences[:, tests] >= threshold[tests]).sum(0)
    return ((exceed_counts + 1) / (len(flips) + 1)).reshape(shape)


def max_t_test(
    sums: ArrayLike,
    baselines: ArrayLike,
    counts: ArrayLike,
    *,
    draws: int = 2000,
    seed: int = 0,
    min_units: int = MIN_UNITS,
) -> tuple[np.ndarray, int]:
    """Compute family-wise p-values of many tests of sums against baseline sums with a max-T sign-flip test.

    The statistic of a test is Σd / √Σd², where d is the difference of a unit. It is a t statistic with the spread measured
    around 0, which sign flips do not change. So tests with few units do not dominate the maximum, and a constant difference
    still counts. p is the fraction of sign flips, common to all tests, whose largest statistic in the family reaches the
    observed one (single-step procedure; Westfall and Young, Resampling-Based Multiple Testing, 1993).

    The test assumes that differences are roughly symmetric. It is conservative for a low baseline and anti-conservative for a
    baseline near 1. Compare such heads with a baseline on the same rows instead.

    Args:
        sums: Sums over the rows of each unit, (units, tests…).
        baselines: Baseline sums over the same rows, or a number.
        counts: Number of rows of each unit, (units, tests…).
        draws: Maximum number of sign flips.
        seed: Seed of the random generator.
        min_units: Tests with fewer units, or without any difference, get p = 1 and are not in the family.

    Returns:
        p-values, (tests…), and the number of tests in the family.

    >>> p, family = max_t_test(np.ones((8, 2)) * [1., 0.], 0.0, np.ones((8, 2)))
    >>> p.tolist(), family
    ([0.00390625, 1.0], 1)
    """
    sums, counts = _validated_sums_and_counts(sums, counts)
    (differences, counts), shape = _flatten_test_axes(
        [_subtract_baselines(sums, baselines, counts), counts], counts > 0
    )
    spread = np.sqrt((differences**2).sum(0))
    eligible = ((counts > 0).sum(0) >= min_units) & (spread > 0)
    p = np.ones(differences.shape[1])
    if not eligible.any():
        return p.reshape(shape), 0
    scaled = differences[:, eligible] / spread[eligible]
    flips = _flips(len(scaled), draws, seed)
    largest = np.full(len(flips), -np.inf)
    for tests in _chunks(scaled.shape[1], len(flips)):
        np.maximum(largest, (flips @ scaled[:, tests]).max(1), out=largest)
    threshold = scaled.sum(0) - _rounding_tolerance(scaled)
    exceed_counts = len(flips) - np.searchsorted(
        np.sort(largest), threshold
    )  # number of flips that reach the statistic
    p[eligible] = (exceed_counts + 1) / (len(flips) + 1)
    return p.reshape(shape), int(eligible.sum())


def benjamini_hochberg(p: ArrayLike) -> np.ndarray:
    """Adjust p-values for the false discovery rate (https://doi.org/10.1111/j.2517-6161.1995.tb02031.x).

    Args:
        p: p-values of any shape. NaN stays NaN and does not count as a test.

    Returns:
        Adjusted p-values of the same shape.

    >>> benjamini_hochberg([0.01, 0.02, 0.03, 0.5]).round(4).tolist()
    [0.04, 0.04, 0.04, 0.5]
    """
    p = np.asarray(p, float)
    adjusted, tested = np.full(p.shape, np.nan), ~np.isnan(p)
    if ((p[tested] < 0) | (p[tested] > 1)).any():
        raise ArgumentError(
            f"p: p-values must be between 0 and 1. Got values from {p[tested].min():g} to {p[tested].max():g}."
        )
    order = np.argsort(-p[tested])  # descending
    ranked = p[tested][order] * len(order) / np.arange(len(order), 0, -1)
    sorted_adjusted = np.empty(len(order))
    sorted_adjusted[order] = np.minimum.accumulate(ranked)  # adjusted values are monotone in p
    adjusted[tested] = sorted_adjusted
    return adjusted


def holm_correction(p: ArrayLike) -> np.ndarray:
    """Adjust p-values of a family of tests with the Holm procedure.

    It controls the family-wise error rate under any dependence. The smallest p-value is multiplied by the number of tests,
    the next by one less, and so on; adjusted values never decrease (Holm, A simple sequentially rejective multiple test
    procedure, 1979).

    Args:
        p: p-values, (tests,).

    Returns:
        Adjusted p-values, (tests,).

    >>> holm_correction([0.01, 0.04, 0.03, 0.005]).round(4).tolist()
    [0.03, 0.06, 0.06, 0.02]
    """
    p = np.asarray(p, float)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise ArgumentError(
            f"p: a one-dimensional list of p-values between 0 and 1 is required. Got {p.tolist()!r:.80}."
        )
    order = np.argsort(p)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return adjusted


def _interval(
    statistic: Callable[[np.ndarray, slice], np.ndarray],
    enough: np.ndarray,
    reference: np.ndarray,
    shape: tuple[int, ...],
    draws: int,
    seed: int,
    level: float,
) -> Interval:
    """Compute the percentile interval of a statistic. It gets the number of times that each unit was drawn."""
    if not 0 < level < 1 or draws < 1:
        raise ArgumentError(
            f"level must be between 0 and 1, and draws at least 1. Got level={level} and draws={draws}."
        )
    ends = np.full((2, len(enough)), np.nan)
    units = len(reference)
    if enough.any():
        times = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=draws).astype(float)
        for tests in _chunks(len(enough), draws):
            values = statistic(times, tests)  # (draws, some tests)
            defined = np.isfinite(values).any(0) & enough[tests]
            # Ignore draws in which all units of a test are empty.
            quantile = np.nanquantile if np.isnan(values).any() else np.quantile
            ends[:, tests][:, defined] = quantile(values[:, defined], [(1 - level) / 2, (1 + level) / 2], axis=0)
    return ends[0].reshape(shape), ends[1].reshape(shape)


def _flips(units: int, draws: int, seed: int) -> np.ndarray:
    """Return signs of the units, (B, units): all patterns except the identity if there are few, otherwise random ones."""
    if draws < 1:
        raise ArgumentError(f"draws={draws}: a permutation test needs at least 1 draw.")
    if units < 60 and 2**units <= draws + 1:
        all_signs = np.arange(1, 2**units)[:, None] >> np.arange(units) & 1
        return 1.0 - 2.0 * all_signs
    return np.random.default_rng(seed).integers(0, 2, (draws, units)) * 2.0 - 1.0


def _validated_sums_and_counts(sums: ArrayLike, counts: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return both as arrays of one shape. Sums of empty units are set to 0."""
    sums, counts = np.asarray(sums, float), np.asarray(counts, float)
    try:
        sums, counts = np.broadcast_arrays(sums, counts)
    except ValueError:
        raise ArgumentError(
            "sums, counts: must have the same shape, (units, tests…), where units are texts, for example. "
            f"Got {sums.shape} and {counts.shape}."
        ) from None
    if sums.ndim == 0:
        raise ArgumentError(
            "sums, counts: must be arrays of shape (units, tests…), with one entry per unit (such as a text) on the first "
            "axis. Got single numbers."
        )
    if not (counts >= 0).all():
        raise ArgumentError("counts must be 0 or more and not NaN: they are the numbers of rows that were summed.")
    if not np.isfinite(sums[counts > 0]).all():
        raise ArgumentError(
            "sums: contains NaN or infinity where counts is above 0. Set counts to 0 for values that could not be measured."
        )
    return np.where(counts > 0, sums, 0.0), counts


def _subtract_baselines(sums: np.ndarray, baselines: ArrayLike, counts: np.ndarray) -> np.ndarray:
    try:
        baselines, _ = _validated_sums_and_counts(np.broadcast_to(np.asarray(baselines, float), sums.shape), counts)
    except ValueError as error:
        raise ArgumentError(
            f"baselines: must be finite numbers of a shape that can be broadcast to that of sums, {sums.shape}. Got: {error}"
        ) from None
    return sums - baselines


def _flatten_test_axes(arrays: list[np.ndarray], filled: np.ndarray) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """Reshape arrays to (units, tests) without units that are empty in every test. Return them and the test shape."""
    shape, units = filled.shape[1:], filled.reshape(len(filled), int(np.prod(filled.shape[1:]))).any(1)
    return [array[units].reshape(int(units.sum()), int(np.prod(shape))) for array in arrays], shape


def _chunks(tests: int, cells_per_test: int) -> Iterator[slice]:
    step = max(1, MAX_CELLS // max(1, cells_per_test))
    return (slice(start, min(start + step, tests)) for start in range(0, tests, step))


def _rounding_tolerance(summed: np.ndarray) -> np.ndarray:
    """Return a bound on the rounding error of a sum, so that equal sums count as reached."""
    return 1e-12 * np.abs(summed).sum(0)


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)
