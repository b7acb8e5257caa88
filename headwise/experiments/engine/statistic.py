"""Statistics of experiments: one value per seed, their mean and its confidence interval."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.special import bdtr, fdtri, ndtri, stdtrit  # scipy.stats has them too, but takes a second to import

from headwise.errors import ArgumentError

Condition = str | int | float | None  # condition of a measurement: a head count, or the name of a variant
# Kind of interval: Student's t for a mean, the part of it inside [0, 1] for a proportion, ranks for a median, Fisher's F for
# a ratio of standard deviations, or given.
IntervalKind = Literal["mean", "proportion", "median", "spread", "known"]
LEVEL = 0.95


@dataclass(frozen=True)
class Statistic:
    """One measured quantity with its confidence interval.

    >>> Statistic.mean_of([1.0, 2.0, 3.0]).mean
    2.0
    >>> statistic = Statistic.mean_of([1.0, 2.0, 3.0])
    >>> round(statistic.low, 3), round(statistic.high, 3)  # 2 ± 4.303 · 1/√3
    (-0.484, 4.484)
    >>> Statistic.mean_of([1.0]).is_interval_above(0), statistic.is_interval_above(0)
    (True, False)

    Attributes:
        mean: The mean, or the median if `interval_kind` is "median".
        low: Lower end of the interval, or None if there is a single value.
        high: Upper end of the interval, or None if there is a single value.
        values: One value per seed, measurement or timing round. For "spread" both samples, concatenated.
        interval_kind: Method of the interval.
        level: Confidence level.
    """

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]
    interval_kind: IntervalKind = "mean"
    level: float = LEVEL

    @staticmethod
    def mean_of(values: Sequence[float] | float) -> "Statistic":
        """Return the mean and Student's t interval of one value per seed or measurement."""
        samples = tuple(map(float, [values] if isinstance(values, int | float) else values))
        if not samples:
            raise ArgumentError("values: a statistic needs at least one value. Got an empty sequence.")
        return _estimate(samples, "mean", LEVEL)

    @staticmethod
    def proportion_of(values: Sequence[float] | float) -> "Statistic":
        """Return the mean of one proportion per seed, with the part of Student's t interval that is inside [0, 1].

        The true mean of proportions is inside [0, 1], so the restriction does not change how often the interval contains it.

        >>> statistic = Statistic.proportion_of([0.9, 1.0, 0.95])
        >>> round(statistic.low, 3), statistic.high
        (0.826, 1.0)
        """
        samples = tuple(map(float, [values] if isinstance(values, int | float) else values))
        if not samples or any(not 0 <= value <= 1 for value in samples):
            raise ArgumentError(f"values: proportions must be from 0 to 1, at least one. Got {samples}.")
        return _estimate(samples, "proportion", LEVEL)

    @staticmethod
    def median_of(values: Sequence[float]) -> "Statistic":
        """Return the median of one value per timing round, with its distribution-free interval by ranks.

        >>> statistic = Statistic.median_of([5.0, 1.0, 2.0, 3.0, 4.0, 9.0, 7.0, 6.0])
        >>> statistic.mean, statistic.low, statistic.high  # 8 values: the 2nd to the 7th would have a level of only 93%
        (4.5, 1.0, 9.0)
        """
        return _estimate(tuple(map(float, values)), "median", LEVEL)

    @staticmethod
    def spread_ratio(first: Sequence[float], second: Sequence[float]) -> "Statistic":
        """Return the ratio of the standard deviations of two samples of equal size, with the interval of Fisher's F.

        >>> statistic = Statistic.spread_ratio([1.0, 2.0, 3.0], [1.0, 3.0, 5.0])
        >>> statistic.mean, round(statistic.low, 2), round(statistic.high, 2)  # F of 2 and 2 degrees: 1/39 to 39
        (0.5, 0.08, 3.12)
        """
        if len(first) != len(second):
            raise ArgumentError(f"first and second must have equal length. Got {len(first)} and {len(second)} values.")
        return _estimate((*map(float, first), *map(float, second)), "spread", LEVEL)

    @staticmethod
    def with_interval(mean: float, low: float, high: float) -> "Statistic":
        """Return a statistic whose 95% interval is given, for example a bootstrap over texts."""
        return Statistic(float(mean), float(low), float(high), (float(mean),), "known")

    def at_confidence_level(self, level: float) -> "Statistic":
        """Return the statistic with an interval of another confidence level. A given interval is scaled as if normal."""
        if self.low is None or self.high is None or level == self.level:
            return self
        if self.interval_kind != "known":
            return _estimate(self.values, self.interval_kind, level)
        scale = float(ndtri((1 + level) / 2) / ndtri((1 + self.level) / 2))
        low, high = (self.mean + (end - self.mean) * scale for end in (self.low, self.high))
        return replace(self, low=low, high=high, level=level)

    def is_interval_above(self, threshold: float) -> bool:
        """Whether the entire interval is above the threshold. A single value is compared itself."""
        return (self.mean if self.low is None else self.low) > threshold

    def is_interval_below(self, threshold: float) -> bool:
        """Whether the entire interval is below the threshold. A single value is compared itself."""
        return (self.mean if self.high is None else self.high) < threshold

    def __str__(self) -> str:
        ends = "" if self.low is None or self.high is None else f" ({self.low:.4g} to {self.high:.4g})"
        return f"{self.mean:.4g}{ends}"


def _estimate(values: tuple[float, ...], interval_kind: IntervalKind, level: float) -> Statistic:
    if len(values) == 1:
        return Statistic(values[0], None, None, values, interval_kind, level)
    if not all(map(math.isfinite, values)):  # diverged runs: the mean is known only if all values are equal
        all_equal = len(set(values)) == 1 and interval_kind != "spread"
        mean, low, high = (values[0],) * 3 if all_equal else (math.nan, -math.inf, math.inf)
    else:
        mean, low, high = {
            "mean": _mean_interval, "proportion": _proportion_interval, "median": _median_interval,
            "spread": _two_sample_std_ratio,
        }[interval_kind](values, level)  # fmt: skip
    return Statistic(mean, low, high, values, interval_kind, level)


def _mean_interval(values: tuple[float, ...], level: float) -> tuple[float, float, float]:
    mean, n = float(np.mean(values)), len(values)
    half_width = float(stdtrit(n - 1, (1 + level) / 2) * np.std(values, ddof=1) / math.sqrt(n))
    return mean, mean - half_width, mean + half_width


def _proportion_interval(values: tuple[float, ...], level: float) -> tuple[float, float, float]:
    mean, low, high = _mean_interval(values, level)
    return mean, max(0.0, low), min(1.0, high)


def _median_interval(values: tuple[float, ...], level: float) -> tuple[float, float, float]:
    """Return the median and the interval from the k-th smallest to the k-th largest value.

    The true median is outside if fewer than k values fell on one side of it.
    """
    n, ordered = len(values), sorted(values)
    k = sum(2 * float(bdtr(fewer, n, 0.5)) <= 1 - level for fewer in range(n // 2))
    low, high = (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)  # too few values for this level
    return statistics.median(values), low, high


def _two_sample_std_ratio(values: tuple[float, ...], level: float) -> tuple[float, float, float]:
    n = len(values) // 2
    first, second = (float(np.std(sample, ddof=1)) for sample in (values[:n], values[n:]))
    ratio = first / second if second else math.nan if not first else math.inf
    upper, lower = (math.sqrt(fdtri(n - 1, n - 1, q)) for q in ((1 + level) / 2, (1 - level) / 2))
    return ratio, ratio / upper, ratio / lower


class StatisticTable:
    """Statistics by name and condition: `table["loss", 8]`, or all conditions of a name: `table.by_condition("loss")`.

    >>> table = StatisticTable().add("loss", 1, [2.5, 2.7]).add("loss", 8, [2.4, 2.4]).add("parameters", None, 10)
    >>> table["loss", 8].mean, list(table.by_condition("loss")), table["parameters"].mean
    (2.4, [1, 8], 10.0)
    """

    def __init__(self) -> None:
        self._statistics: dict[tuple[str, Condition], Statistic] = {}

    def add(self, name: str, condition: Condition, values: Statistic | Sequence[float] | float) -> "StatisticTable":
        """Add a statistic and return the table."""
        self._statistics[name, condition] = values if isinstance(values, Statistic) else Statistic.mean_of(values)
        return self

    def add_proportion(self, name: str, condition: Condition, values: Sequence[float] | float) -> "StatisticTable":
        """Add one proportion per seed and return the table. Its interval is inside [0, 1]."""
        return self.add(name, condition, Statistic.proportion_of(values))

    def __contains__(self, key: object) -> bool:
        return key in self._statistics

    def __getitem__(self, name_or_key: str | tuple[str, Condition]) -> Statistic:
        key = (name_or_key, None) if isinstance(name_or_key, str) else name_or_key
        if key not in self._statistics:
            raise ArgumentError(
                f"statistic {key[0]!r} at condition {key[1]!r} does not exist. Available names: {', '.join(self.names)}."
            )
        return self._statistics[key]

    def __iter__(self) -> Iterator[tuple[str, Condition, Statistic]]:
        return ((name, condition, statistic) for (name, condition), statistic in self._statistics.items())

    def __len__(self) -> int:
        return len(self._statistics)

    def bonferroni(self, keys: Iterable[tuple[str, Condition]]) -> "StatisticTable":
        """Widen the intervals of these keys so that all of them are correct at once with 95% confidence (Bonferroni).

        >>> table = StatisticTable().add("lost", "a", [1.0, 2.0, 3.0]).add("lost", "b", [1.0, 2.0, 3.0])
        >>> round(table.bonferroni([("lost", "a")])["lost", "a"].low, 3)  # a single interval is not corrected
        -0.484
        >>> round(table.bonferroni([("lost", "a"), ("lost", "b")])["lost", "a"].low, 3)  # t(2) at 1 − 0.05/4: 6.205
        -1.583
        """
        selected = {key for key in keys if key in self._statistics and self._statistics[key].low is not None}
        level = 1 - (1 - LEVEL) / max(1, len(selected))
        corrected = StatisticTable()
        for (name, condition), statistic in self._statistics.items():
            corrected.add(
                name, condition, statistic.at_confidence_level(level) if (name, condition) in selected else statistic
            )
        return corrected

    @property
    def names(self) -> list[str]:
        """Distinct names."""
        return list(dict.fromkeys(name for name, _ in self._statistics))

    def by_condition(self, name: str) -> dict[Condition, Statistic]:
        """Return all statistics with this name, by condition."""
        return {
            condition: statistic
            for (other_name, condition), statistic in self._statistics.items()
            if other_name == name
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """Return JSON-compatible rows. Values that are not finite become the strings inf, -inf and nan."""
        return [
            {
                "name": name, "condition": condition, "mean": _json_number(statistic.mean),
                "low": _json_number(statistic.low), "high": _json_number(statistic.high),
                "values": [_json_number(value) for value in statistic.values],
                "interval_kind": statistic.interval_kind, "level": statistic.level,
            }
            for name, condition, statistic in self
        ]  # fmt: skip

    @staticmethod
    def from_rows(rows: Sequence[Mapping[str, Any]]) -> "StatisticTable":
        """Create a table from the rows of `to_rows`."""
        table = StatisticTable()
        for row in rows:
            low, high = (None if row[end] is None else float(row[end]) for end in ("low", "high"))
            values = tuple(map(float, row["values"]))
            statistic = Statistic(float(row["mean"]), low, high, values, row["interval_kind"], row["level"])
            table.add(row["name"], row["condition"], statistic)
        return table


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
