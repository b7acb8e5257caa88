"""Figures an experiment gives: a number for every seed, their mean, and how sure one can be of it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t as student

from headwise.errors import HeadwiseError

At = str | int | float | None  # what a figure was measured at: a number of heads, the name of a variant


@dataclass(frozen=True)
class Figure:
    """One quantity. `low` and `high` are the ends of its 95 % interval, None where a single seed gives none.

    >>> Figure.over([1.0, 2.0, 3.0]).mean
    2.0
    >>> made = Figure.over([1.0, 2.0, 3.0])
    >>> round(made.low, 3), round(made.high, 3)  # 2 ± 4.303 · 1/√3
    (-0.484, 4.484)
    >>> Figure.over([1.0]).above(0), made.above(0)
    (True, False)
    """

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]  # one for every seed

    @staticmethod
    def over(values: Sequence[float] | float) -> "Figure":
        """Of one value for each seed: the mean and Student's interval."""
        many = tuple(map(float, [values] if isinstance(values, int | float) else values))
        if not many:
            raise HeadwiseError("a figure needs at least one value.")
        if len(many) == 1:
            return Figure(many[0], None, None, many)
        if not all(map(math.isfinite, many)):  # a run diverged: if all did alike that is sure, else nothing is
            same = len(set(many)) == 1
            return Figure(many[0], many[0], many[0], many) if same else Figure(math.nan, -math.inf, math.inf, many)
        mean = float(np.mean(many))
        half = float(student.ppf(0.975, len(many) - 1) * np.std(many, ddof=1) / math.sqrt(len(many)))
        return Figure(mean, mean - half, mean + half, many)

    @staticmethod
    def known(mean: float, low: float, high: float) -> "Figure":
        """Of a mean whose interval was found another way, as over texts or over turns of a clock."""
        return Figure(float(mean), float(low), float(high), (float(mean),))

    def above(self, bar: float) -> bool:
        """Surely above: the whole interval is; with a single seed, the one number."""
        return (self.mean if self.low is None else self.low) > bar

    def below(self, bar: float) -> bool:
        """Surely below."""
        return (self.mean if self.high is None else self.high) < bar

    def __str__(self) -> str:
        ends = "" if self.low is None or self.high is None else f" ({self.low:.4g} to {self.high:.4g})"
        return f"{self.mean:.4g}{ends}"


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
                "values": [_plain(value) for value in f.values],
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
            made.add(row["name"], row["at"], Figure(float(row["mean"]), low, high, values))
        return made


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
