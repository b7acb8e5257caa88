"""A claim: one sentence, an experiment, and a rule that turns figures into a verdict."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.experiments.engine.experiment_config import Point
from headwise.experiments.engine.statistic import At, Figures

if TYPE_CHECKING:
    from headwise.experiments.experiment import Lab
    from headwise.model import AnyModel

Word = Literal["holds", "does not hold", "depends", "true by construction"]
FOUND: tuple[Word, ...] = ("holds", "does not hold", "depends")  # what figures can say of a claim that might be wrong
WORDS: tuple[Word, ...] = (*FOUND, "true by construction")


@dataclass(frozen=True)
class Verdict:
    """What the figures say; `on` is what it depends on, or how far it holds.

    `true by construction` is no evidence: the algebra of a layer says so before anything is measured, and measuring it
    tests this code.
    """

    word: Word
    on: str = ""

    def __str__(self) -> str:
        return self.word if not self.on else f"{self.word}: {self.on}"


@dataclass(frozen=True)
class Picture:
    """Which figures are drawn: lines where they were measured at numbers, bars where at names."""

    figures: tuple[str, ...]
    x: str = ""
    y: str = ""
    log: bool = False  # the x axis grows by factors


FiguresNeeded = Callable[[Figures], Iterable[tuple[str, At]]]


def every(*names: str) -> FiguresNeeded:
    """All figures of these names: what most rules look at.

    >>> list(every("lost")(Figures().add("lost", "a", 1.0).add("loss", "a", 2.0)))
    [('lost', 'a')]
    """
    return lambda figures: ((name, at) for name in names for at in figures.at(name))


def listed(lists: Mapping[str, Sequence[str]]) -> str:
    """What was found of several things, in a line; empty lists are left out.

    >>> listed({"shown": ["local early"], "open": [], "not so": ["semantic late", "long range late"]})
    'shown: local early; not so: semantic late, long range late'
    """
    return "; ".join(f"{word}: {', '.join(some)}" for word, some in lists.items() if some)


def _none(of: Any) -> tuple[()]:
    return ()


@dataclass(frozen=True)
class Claim:
    """One file of claims/ has one of these, called CLAIM."""

    number: int
    name: str
    says: str  # the claim, as guides make it
    against: str  # what would count against it
    setup: str
    rule: str  # how the verdict follows from the figures
    measure: Callable[["Lab"], Figures]
    judge: Callable[[Figures], Verdict]
    picture: Picture
    asks: FiguresNeeded = _none  # the figures whose intervals the rule looks at: they are made to hold together
    words: tuple[Word, ...] = FOUND  # the verdicts its rule can reach
    identity: str = ""  # what of it is true by construction, and so is no finding
    points: Callable[["Lab"], Iterable[Point]] = _none  # the trained models it asks for
    timed: bool = False  # it measures time or memory: alone on the machine, and never twice the same
    on: Callable[["AnyModel", Any], Figures] | None = None  # the same for a model and a text that are given
    also: Callable[[], str] = str  # what else decides its figures, as what is installed
    version: int = 1  # of `measure`: raised when it gives other figures, as said in versions.py

    def decide(self, figures: Figures) -> tuple[Figures, Verdict]:
        """The figures with the intervals the rule looks at made to hold together, and what it says of them."""
        corrected = figures.together(self.asks(figures))
        return corrected, self.judge(corrected)
