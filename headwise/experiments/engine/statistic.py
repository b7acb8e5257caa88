"""Figures an experiment gives: a number for every seed, their mean, and how sure one can be of it."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.special import bdtr, fdtri, ndtri, stdtrit  # scipy.stats has them too, and takes a second to import

from headwise.errors import HeadwiseError

Condition = str | int | float | None  # what a figure was measured at: a number of heads, the name of a variant
# How its interval is found: Student's of a mean, by ranks of a median, Fisher's of two spreads, or known from elsewhere.
IntervalKind = Literal["mean", "median", "spread", "known"]
LEVEL = 0.95


@dataclass(frozen=True)
class Statistic:
    """One quantity. `low` and `high` are the ends of its interval, None where a single value gives none.

    >>> Statistic.mean_of([1.0, 2.0, 3.0]).mean
    2.0
    >>> statistic = Statistic.mean_of([1.0, 2.0, 3.0])
    >>> round(statistic.low, 3), round(statistic.high, 3)  # 2 ± 4.303 · 1/√3
    (-0.484, 4.484)
    >>> Statistic.mean_of([1.0]).is_interval_above(0), statistic.is_interval_above(0)
    (True, False)
    """

    mean: float  # of `median`: the median
    low: float | None
    high: float | None
    values: tuple[float, ...]  # one for every seed, measurement or turn; of `spread` both samples, one after the other
    interval_kind: IntervalKind = "mean"
    level: float = LEVEL

    @staticmethod
    def mean_of(values: Sequence[float] | float) -> "Statistic":
        """Of one value for each seed, or each measurement: the mean and Student's interval."""
        samples = tuple(map(float, [values] if isinstance(values, int | float) else values))
        if not samples:
            raise HeadwiseError("a figure needs at least one value.")
        return _estimate(samples, "mean", LEVEL)

    @staticmethod
    def median_of(values: Sequence[float]) -> "Statistic":
        """Of one value for each turn of a clock: the median, and its interval by ranks, however they spread.

        >>> statistic = Statistic.median_of([5.0, 1.0, 2.0, 3.0, 4.0, 9.0, 7.0, 6.0])
        >>> statistic.mean, statistic.low, statistic.high  # eight turns: the second to the seventh would hold with 93 % only
        (4.5, 1.0, 9.0)
        """
        return _estimate(tuple(map(float, values)), "median", LEVEL)

    @staticmethod
    def spread_ratio(first: Sequence[float], second: Sequence[float]) -> "Statistic":
        """The standard deviation of one sample over that of another as large, with the interval of Fisher's F.

        >>> statistic = Statistic.spread_ratio([1.0, 2.0, 3.0], [1.0, 3.0, 5.0])
        >>> statistic.mean, round(statistic.low, 2), round(statistic.high, 2)  # F of 2 and 2 degrees: 1/39 to 39
        (0.5, 0.08, 3.12)
        """
        if len(first) != len(second):
            raise HeadwiseError(f"spreads are compared of as many values each; got {len(first)} and {len(second)}.")
        return _estimate((*map(float, first), *map(float, second)), "spread", LEVEL)

    @staticmethod
    def with_interval(mean: float, low: float, high: float) -> "Statistic":
        """Of a mean whose 95 % interval was found another way, as over texts."""
        return Statistic(float(mean), float(low), float(high), (float(mean),), "known")

    def at_confidence_level(self, level: float) -> "Statistic":
        """The same with an interval that holds so often. One that is known is widened as a normal one would be."""
        if self.low is None or self.high is None or level == self.level:
            return self
        if self.interval_kind != "known":
            return _estimate(self.values, self.interval_kind, level)
        scale = float(ndtri((1 + level) / 2) / ndtri((1 + self.level) / 2))
        low, high = (self.mean + (end - self.mean) * scale for end in (self.low, self.high))
        return replace(self, low=low, high=high, level=level)

    def is_interval_above(self, threshold: float) -> bool:
        """Surely above: the whole interval is; with a single value, the one number."""
        return (self.mean if self.low is None else self.low) > threshold

    def is_interval_below(self, threshold: float) -> bool:
        """Surely below."""
        return (self.mean if self.high is None else self.high) < threshold

    def __str__(self) -> str:
        ends = "" if self.low is None or self.high is None else f" ({self.low:.4g} to {self.high:.4g})"
        return f"{self.mean:.4g}{ends}"


def _estimate(values: tuple[float, ...], interval_kind: IntervalKind, level: float) -> Statistic:
    if len(values) == 1:
        return Statistic(values[0], None, None, values, interval_kind, level)
    if not all(map(math.isfinite, values)):  # a run diverged: if all did alike that is sure, else nothing is
        all_equal = len(set(values)) == 1 and interval_kind != "spread"
        mean, low, high = (values[0],) * 3 if all_equal else (math.nan, -math.inf, math.inf)
    else:
        mean, low, high = {"mean": _mean_interval, "median": _median_interval, "spread": _spread_ratio_interval}[
            interval_kind
        ](values, level)
    return Statistic(mean, low, high, values, interval_kind, level)


def _mean_interval(values: tuple[float, ...], level: float) -> tuple[float, float, float]:
    mean, n = float(np.mean(values)), len(values)
    half_width = float(stdtrit(n - 1, (1 + level) / 2) * np.std(values, ddof=1) / math.sqrt(n))
    return mean, mean - half_width, mean + half_width


def _median_interval(values: tuple[float, ...], level: float) -> tuple[float, float, float]:
    """From the k-th smallest to the k-th largest: the true median lies outside if fewer than k fell on one side of it."""
    n, ordered = len(values), sorted(values)
    k = sum(2 * float(bdtr(fewer, n, 0.5)) <= 1 - level for fewer in range(n // 2))
    low, high = (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)  # so few turns are never as sure as that
    return statistics.median(values), low, high


def _spread_ratio_interval(values: tuple[float, ...], level: float) -> tuple[float, float, float]:
    n = len(values) // 2
    first, second = (float(np.std(sample, ddof=1)) for sample in (values[:n], values[n:]))
    ratio = first / second if second else math.nan if not first else math.inf
    upper, lower = (math.sqrt(fdtri(n - 1, n - 1, q)) for q in ((1 + level) / 2, (1 - level) / 2))
    return ratio, ratio / upper, ratio / lower


class StatisticTable:
    """Named figures, each at something: `table["loss", 8]`, or all of a name: `table.by_condition("loss")`.

    >>> table = StatisticTable().add("loss", 1, [2.5, 2.7]).add("loss", 8, [2.4, 2.4]).add("parameters", None, 10)
    >>> table["loss", 8].mean, list(table.by_condition("loss")), table["parameters"].mean
    (2.4, [1, 8], 10.0)
    """

    def __init__(self) -> None:
        self._statistics: dict[tuple[str, Condition], Statistic] = {}

    def add(self, name: str, condition: Condition, values: Statistic | Sequence[float] | float) -> "StatisticTable":
        """One more; returns itself."""
        self._statistics[name, condition] = values if isinstance(values, Statistic) else Statistic.mean_of(values)
        return self

    def __getitem__(self, name_or_key: str | tuple[str, Condition]) -> Statistic:
        key = (name_or_key, None) if isinstance(name_or_key, str) else name_or_key
        if key not in self._statistics:
            raise HeadwiseError(f"there is no figure {key[0]!r} at {key[1]!r}; there is {', '.join(self.names)}.")
        return self._statistics[key]

    def __iter__(self) -> Iterator[tuple[str, Condition, Statistic]]:
        return ((name, condition, statistic) for (name, condition), statistic in self._statistics.items())

    def __len__(self) -> int:
        return len(self._statistics)

    def bonferroni(self, keys: Iterable[tuple[str, Condition]]) -> "StatisticTable":
        """The same, the intervals that are asked for so wide that all of them hold at once with 95 %: Bonferroni's.

        >>> table = StatisticTable().add("lost", "a", [1.0, 2.0, 3.0]).add("lost", "b", [1.0, 2.0, 3.0])
        >>> round(table.bonferroni([("lost", "a")])["lost", "a"].low, 3)  # one is not corrected
        -0.484
        >>> round(table.bonferroni([("lost", "a"), ("lost", "b")])["lost", "a"].low, 3)  # t of 2 degrees at 1 − .05/4: 6.205
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
        """Every name, once."""
        return list(dict.fromkeys(name for name, _ in self._statistics))

    def by_condition(self, name: str) -> dict[Condition, Statistic]:
        """All figures of a name, by what they were measured at."""
        return {
            condition: statistic
            for (other_name, condition), statistic in self._statistics.items()
            if other_name == name
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """Plain data, a row each; what is not finite is a word, as JSON has no number for it: inf, -inf, nan."""
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
        """The figures of rows written before."""
        table = StatisticTable()
        for row in rows:
            low, high = (None if row[end] is None else float(row[end]) for end in ("low", "high"))
            values = tuple(map(float, row["values"]))
            statistic = Statistic(float(row["mean"]), low, high, values, row["interval_kind"], row["level"])
            table.add(row["name"], row["condition"], statistic)
        return table


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
