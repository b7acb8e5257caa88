"""How sure one can be: intervals and p-values from sums and counts per unit, never from maps.

Units are what is drawn: sentences, documents, or buckets of them, the first axis everywhere. Tokens of a sentence lean on
each other, so drawing tokens would promise too much. All other axes are tests (heads, measures), done side by side on the
same draws.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import ArrayLike

from headwise.errors import HeadwiseError

MIN_UNITS = 5  # units a test needs before it is tested at all
MAX_CELLS = 1 << 22  # numbers held at once: draws × tests

Interval = tuple[np.ndarray, np.ndarray]


def bootstrap_interval(
    sums: ArrayLike, counts: ArrayLike, *, draws: int = 1000, seed: int = 0, level: float = 0.95
) -> Interval:
    """The interval of Σ sums / Σ counts when units are drawn anew: (units, tests…) → low and high, (tests…).

    A unit that is empty in every test is no unit. A test with fewer than two units has no interval: NaN.

    >>> low, high = bootstrap_interval([[1.], [3.], [2.], [2.]], [[4.], [4.], [4.], [4.]])
    >>> float(low[0]), float(high[0])
    (0.3125, 0.6875)
    """
    sums, counts = _sums_and_counts(sums, counts)
    (sums, counts), shape = _flatten_tests([sums, counts], counts > 0)
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
    """The interval of a's ratio minus b's, paired: both see the same draws of units. (units, tests…) → (tests…).

    >>> low, high = bootstrap_difference_interval([3., 1., 2.], [4., 4., 4.], [2., 0., 1.], [4., 4., 4.])
    >>> round(float(low), 4), round(float(high), 4)
    (0.25, 0.25)
    """
    sums_a, counts_a = _sums_and_counts(sums_a, counts_a)
    sums_b, counts_b = _sums_and_counts(sums_b, counts_b)
    if len(sums_a) != len(sums_b):
        raise HeadwiseError(f"paired sums need the same units, got {len(sums_a)} and {len(sums_b)}.")
    sums_a, counts_a, sums_b, counts_b = np.broadcast_arrays(sums_a, counts_a, sums_b, counts_b)
    arrays, shape = _flatten_tests([sums_a, counts_a, sums_b, counts_b], (counts_a > 0) | (counts_b > 0))
    enough = ((arrays[1] > 0).sum(0) >= 2) & ((arrays[3] > 0).sum(0) >= 2)

    def difference(times: np.ndarray, tests: slice) -> np.ndarray:
        a, of_a, b, of_b = (times @ array[:, tests] for array in arrays)
        return _ratio(a, of_a) - _ratio(b, of_b)

    return _interval(difference, enough, arrays[0], shape, draws, seed, level)


def sign_flip_test(differences: ArrayLike, counts: ArrayLike, *, draws: int = 2000, seed: int = 0) -> np.ndarray:
    """Is the mean difference above 0? One-sided p by flipping the signs of whole units: (units, tests…) → (tests…).

    `differences` are sums over the rows of a unit, `counts` how many. If nothing is there, a unit's sum is as likely to
    be −x as x. p = (b + 1)/(B + 1); where all flips are no more than `draws`, they are all made and p is exact.

    >>> float(sign_flip_test([1., 2., 3.], [1, 1, 1]))  # 1 flip of 8 reaches 6: none but the data
    0.125
    """
    differences, counts = _sums_and_counts(differences, counts)
    (differences, _), shape = _flatten_tests([differences, counts], counts > 0)
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
    """Family-wise p of many tests, sums against baseline sums over the same rows: (units, tests…) → p (tests…), family size.

    Each test's statistic is Σd / √Σd², d a unit's difference: the t-test's, with the spread taken about 0, which flips
    leave alone; so tests with few units do not own the maximum, and a difference that never varies still counts. p is the
    share of common sign flips whose largest statistic in the family reaches it, in a single step (Westfall and Young,
    Resampling-Based Multiple Testing, 1993). Tests with fewer than `min_units` units, or with no difference anywhere, get
    p = 1 and are not in the family. Flips take differences to be about symmetric: against a low baseline p errs on the safe
    side, against a baseline near 1 it promises too much; hold such heads against a baseline on the same rows instead.

    >>> p, family = max_t_test(np.ones((8, 2)) * [1., 0.], 0.0, np.ones((8, 2)))
    >>> p.tolist(), family
    ([0.00390625, 1.0], 1)
    """
    sums, counts = _sums_and_counts(sums, counts)
    (differences, counts), shape = _flatten_tests([_differences(sums, baselines, counts), counts], counts > 0)
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
    exceed_counts = len(flips) - np.searchsorted(np.sort(largest), threshold)  # how many are at least as large
    p[eligible] = (exceed_counts + 1) / (len(flips) + 1)
    return p.reshape(shape), int(eligible.sum())


def benjamini_hochberg(p: ArrayLike) -> np.ndarray:
    """p-values adjusted for the false discovery rate, for screening lists; NaN stays NaN and is no test.

    https://doi.org/10.1111/j.2517-6161.1995.tb02031.x

    >>> benjamini_hochberg([0.01, 0.02, 0.03, 0.5]).round(4).tolist()
    [0.04, 0.04, 0.04, 0.5]
    """
    p = np.asarray(p, float)
    adjusted, tested = np.full(p.shape, np.nan), ~np.isnan(p)
    if ((p[tested] < 0) | (p[tested] > 1)).any():
        raise HeadwiseError(f"p-values lie in 0-1, got {p[tested].min():g} to {p[tested].max():g}.")
    order = np.argsort(-p[tested])  # the largest first
    ranked = p[tested][order] * len(order) / np.arange(len(order), 0, -1)
    sorted_adjusted = np.empty(len(order))
    sorted_adjusted[order] = np.minimum.accumulate(ranked)  # never above that of a larger one
    adjusted[tested] = sorted_adjusted
    return adjusted


def holm_correction(p: ArrayLike) -> np.ndarray:
    """p-values of a family adjusted so that one false alarm anywhere is as rare as told, whatever depends on what: (tests,).

    The smallest is multiplied by the number of tests, the next by one less, and none is below a smaller one
    (Holm, A simple sequentially rejective multiple test procedure, 1979).

    >>> holm_correction([0.01, 0.04, 0.03, 0.005]).round(4).tolist()
    [0.03, 0.06, 0.06, 0.02]
    """
    p = np.asarray(p, float)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise HeadwiseError(f"a family is a list of p-values in 0-1, got {p.tolist()!r:.80}.")
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
    """The percentile interval of a statistic of how often each unit was drawn."""
    if not 0 < level < 1 or draws < 1:
        raise HeadwiseError(f"an interval needs a level between 0 and 1 and some draws, got {level} and {draws}.")
    ends = np.full((2, len(enough)), np.nan)
    units = len(reference)
    if enough.any():
        times = np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=draws).astype(float)
        for tests in _chunks(len(enough), draws):
            values = statistic(times, tests)  # (draws, some tests)
            defined = np.isfinite(values).any(0) & enough[tests]
            # A draw in which a test met empty units alone says nothing about it.
            quantile = np.nanquantile if np.isnan(values).any() else np.quantile
            ends[:, tests][:, defined] = quantile(values[:, defined], [(1 - level) / 2, (1 + level) / 2], axis=0)
    return ends[0].reshape(shape), ends[1].reshape(shape)


def _flips(units: int, draws: int, seed: int) -> np.ndarray:
    """Signs for every unit, (B, units): all but the data's own where they are few, else drawn."""
    if draws < 1:
        raise HeadwiseError(f"a permutation test needs some draws, got {draws}.")
    if units < 60 and 2**units <= draws + 1:
        all_signs = np.arange(1, 2**units)[:, None] >> np.arange(units) & 1
        return 1.0 - 2.0 * all_signs
    return np.random.default_rng(seed).integers(0, 2, (draws, units)) * 2.0 - 1.0


def _sums_and_counts(sums: ArrayLike, counts: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both as arrays of one shape; what stands in an empty unit is nothing."""
    sums, counts = np.asarray(sums, float), np.asarray(counts, float)
    try:
        sums, counts = np.broadcast_arrays(sums, counts)
    except ValueError:
        raise HeadwiseError(f"sums are {sums.shape} but counts {counts.shape}; both are (units, tests…).") from None
    if sums.ndim == 0:
        raise HeadwiseError("sums and counts need an axis of units, (units, tests…); got single numbers.")
    if not (counts >= 0).all():
        raise HeadwiseError("counts are how many rows were summed: 0 or more, and never NaN.")
    if not np.isfinite(sums[counts > 0]).all():
        raise HeadwiseError("some sums are not finite; rows that could not be measured must not be counted.")
    return np.where(counts > 0, sums, 0.0), counts


def _differences(sums: np.ndarray, baselines: ArrayLike, counts: np.ndarray) -> np.ndarray:
    try:
        baselines, _ = _sums_and_counts(np.broadcast_to(np.asarray(baselines, float), sums.shape), counts)
    except ValueError as error:
        raise HeadwiseError(f"baselines do not fit sums of {sums.shape}: {error}") from None
    return sums - baselines


def _flatten_tests(arrays: list[np.ndarray], filled: np.ndarray) -> tuple[list[np.ndarray], tuple[int, ...]]:
    """Arrays as (units, tests) without the units that are empty in every test; and the shape of the tests."""
    shape, units = filled.shape[1:], filled.reshape(len(filled), int(np.prod(filled.shape[1:]))).any(1)
    return [array[units].reshape(int(units.sum()), int(np.prod(shape))) for array in arrays], shape


def _chunks(tests: int, cells_per_test: int) -> Iterator[slice]:
    step = max(1, MAX_CELLS // max(1, cells_per_test))
    return (slice(start, min(start + step, tests)) for start in range(0, tests, step))


def _rounding_tolerance(summed: np.ndarray) -> np.ndarray:
    """What rounding may add to a sum: equal sums must count as reached."""
    return 1e-12 * np.abs(summed).sum(0)


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, sums / counts, np.nan)
