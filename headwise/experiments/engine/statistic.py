"""Figures an experiment gives: a number for every seed, their mean, and how sure one can be of it."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.special import bdtr, fdtri, ndtri, stdtrit  # scipy.stats has them too, and takes a second to import

from headwise.errors import HeadwiseError

At = str | int | float | None  # what a figure was measured at: a number of heads, the name of a variant
# How its interval is found: Student's of a mean, by ranks of a median, Fisher's of two spreads, or known from elsewhere.
How = Literal["mean", "median", "spread", "known"]
LEVEL = 0.95


@dataclass(frozen=True)
class Figure:
    """One quantity. `low` and `high` are the ends of its interval, None where a single value gives none.

    >>> Figure.over([1.0, 2.0, 3.0]).mean
    2.0
    >>> made = Figure.over([1.0, 2.0, 3.0])
    >>> round(made.low, 3), round(made.high, 3)  # 2 ± 4.303 · 1/√3
    (-0.484, 4.484)
    >>> Figure.over([1.0]).above(0), made.above(0)
    (True, False)
    """

    mean: float  # of `median`: the median
    low: float | None
    high: float | None
    values: tuple[float, ...]  # one for every seed, measurement or turn; of `spread` both samples, one after the other
    how: How = "mean"
    level: float = LEVEL

    @staticmethod
    def over(values: Sequence[float] | float) -> "Figure":
        """Of one value for each seed, or each measurement: the mean and Student's interval."""
        many = tuple(map(float, [values] if isinstance(values, int | float) else values))
        if not many:
            raise HeadwiseError("a figure needs at least one value.")
        return _made(many, "mean", LEVEL)

    @staticmethod
    def turns(values: Sequence[float]) -> "Figure":
        """Of one value for each turn of a clock: the median, and its interval by ranks, however they spread.

        >>> made = Figure.turns([5.0, 1.0, 2.0, 3.0, 4.0, 9.0, 7.0, 6.0])
        >>> made.mean, made.low, made.high  # eight turns: the second to the seventh would hold with 93 % only
        (4.5, 1.0, 9.0)
        """
        return _made(tuple(map(float, values)), "median", LEVEL)

    @staticmethod
    def spreads(ones: Sequence[float], others: Sequence[float]) -> "Figure":
        """The standard deviation of one sample over that of another as large, with the interval of Fisher's F.

        >>> made = Figure.spreads([1.0, 2.0, 3.0], [1.0, 3.0, 5.0])
        >>> made.mean, round(made.low, 2), round(made.high, 2)  # F of 2 and 2 degrees: 1/39 to 39
        (0.5, 0.08, 3.12)
        """
        if len(ones) != len(others):
            raise HeadwiseError(f"spreads are compared of as many values each; got {len(ones)} and {len(others)}.")
        return _made((*map(float, ones), *map(float, others)), "spread", LEVEL)

    @staticmethod
    def known(mean: float, low: float, high: float) -> "Figure":
        """Of a mean whose 95 % interval was found another way, as over texts."""
        return Figure(float(mean), float(low), float(high), (float(mean),), "known")

    def at_level(self, level: float) -> "Figure":
        """The same with an interval that holds so often. One that is known is widened as a normal one would be."""
        if self.low is None or self.high is None or level == self.level:
            return self
        if self.how != "known":
            return _made(self.values, self.how, level)
        wider = float(ndtri((1 + level) / 2) / ndtri((1 + self.level) / 2))
        low, high = (self.mean + (end - self.mean) * wider for end in (self.low, self.high))
        return replace(self, low=low, high=high, level=level)

    def above(self, bar: float) -> bool:
        """Surely above: the whole interval is; with a single value, the one number."""
        return (self.mean if self.low is None else self.low) > bar

    def below(self, bar: float) -> bool:
        """Surely below."""
        return (self.mean if self.high is None else self.high) < bar

    def __str__(self) -> str:
        ends = "" if self.low is None or self.high is None else f" ({self.low:.4g} to {self.high:.4g})"
        return f"{self.mean:.4g}{ends}"


def _made(values: tuple[float, ...], how: How, level: float) -> Figure:
    if len(values) == 1:
        return Figure(values[0], None, None, values, how, level)
    if not all(map(math.isfinite, values)):  # a run diverged: if all did alike that is sure, else nothing is
        same = len(set(values)) == 1 and how != "spread"
        mean, low, high = (values[0],) * 3 if same else (math.nan, -math.inf, math.inf)
    else:
        mean, low, high = {"mean": _mean, "median": _median, "spread": _spread}[how](values, level)
    return Figure(mean, low, high, values, how, level)


def _mean(values: tuple[float, ...], level: float) -> tuple[float, float, float]:
    mean, n = float(np.mean(values)), len(values)
    half = float(stdtrit(n - 1, (1 + level) / 2) * np.std(values, ddof=1) / math.sqrt(n))
    return mean, mean - half, mean + half


def _median(values: tuple[float, ...], level: float) -> tuple[float, float, float]:
    """From the k-th smallest to the k-th largest: the true median lies outside if fewer than k fell on one side of it."""
    n, ordered = len(values), sorted(values)
    k = sum(2 * float(bdtr(fewer, n, 0.5)) <= 1 - level for fewer in range(n // 2))
    low, high = (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)  # so few turns are never as sure as that
    return statistics.median(values), low, high


def _spread(values: tuple[float, ...], level: float) -> tuple[float, float, float]:
    n = len(values) // 2
    one, other = (float(np.std(some, ddof=1)) for some in (values[:n], values[n:]))
    ratio = one / other if other else math.nan if not one else math.inf
    most, least = (math.sqrt(fdtri(n - 1, n - 1, q)) for q in ((1 + level) / 2, (1 - level) / 2))
    return ratio, ratio / most, ratio / least


class Figures:
    """Named figures, each at something: `figures["loss", 8]`, or all of a name: `figures.at("loss")`.

    >>> found = Figures().add("loss", 1, [2.5, 2.7]).add("loss", 8, [2.4, 2.4]).add("parameters", None, 10)
    >>> found["loss", 8].mean, list(found.at("loss")), found["parameters"].mean
    (2.4, [1, 8], 10.0)
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, At], Figure] = {}

    def add(self, name: str, at: At, values: Figure | Sequence[float] | float) -> "Figures":
        """One more; returns itself."""
        self._held[name, at] = values if isinstance(values, Figure) else Figure.over(values)
        return self

    def __getitem__(self, which: str | tuple[str, At]) -> Figure:
        key = (which, None) if isinstance(which, str) else which
        if key not in self._held:
            raise HeadwiseError(f"there is no figure {key[0]!r} at {key[1]!r}; there is {', '.join(self.names)}.")
        return self._held[key]

    def __iter__(self) -> Iterator[tuple[str, At, Figure]]:
        return ((name, at, figure) for (name, at), figure in self._held.items())

    def __len__(self) -> int:
        return len(self._held)

    def together(self, needed: Iterable[tuple[str, At]]) -> "Figures":
        """The same, the intervals that are asked for so wide that all of them hold at once with 95 %: Bonferroni's.

        >>> found = Figures().add("lost", "a", [1.0, 2.0, 3.0]).add("lost", "b", [1.0, 2.0, 3.0])
        >>> round(found.together([("lost", "a")])["lost", "a"].low, 3)  # one is not corrected
        -0.484
        >>> round(found.together([("lost", "a"), ("lost", "b")])["lost", "a"].low, 3)  # t of 2 degrees at 1 − .05/4: 6.205
        -1.583
        """
        chosen = {key for key in needed if key in self._held and self._held[key].low is not None}
        level = 1 - (1 - LEVEL) / max(1, len(chosen))
        made = Figures()
        for (name, at), figure in self._held.items():
            made.add(name, at, figure.at_level(level) if (name, at) in chosen else figure)
        return made

    @property
    def names(self) -> list[str]:
        """Every name, once."""
        return list(dict.fromkeys(name for name, _ in self._held))

    def at(self, name: str) -> dict[At, Figure]:
        """All figures of a name, by what they were measured at."""
        return {at: figure for (held, at), figure in self._held.items() if held == name}

    def to_rows(self) -> list[dict[str, Any]]:
        """Plain data, a row each; what is not finite is a word, as JSON has no number for it: inf, -inf, nan."""
        return [
            {
                "name": name, "at": at, "mean": _plain(f.mean), "low": _plain(f.low), "high": _plain(f.high),
                "values": [_plain(value) for value in f.values], "how": f.how, "level": f.level,
            }
            for name, at, f in self
        ]  # fmt: skip

    @staticmethod
    def from_rows(rows: Sequence[Mapping[str, Any]]) -> "Figures":
        """The figures of rows written before."""
        made = Figures()
        for row in rows:
            low, high = (None if row[end] is None else float(row[end]) for end in ("low", "high"))
            values = tuple(map(float, row["values"]))
            figure = Figure(float(row["mean"]), low, high, values, row["how"], row["level"])
            made.add(row["name"], row["at"], figure)
        return made


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
