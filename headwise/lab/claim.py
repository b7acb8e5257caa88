"""A claim: one sentence, an experiment, and a rule that turns figures into a verdict."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.lab.figure import Figures
from headwise.lab.point import Point

if TYPE_CHECKING:
    from headwise.lab.lab import Lab
    from headwise.model import AnyModel

Word = Literal["holds", "does not hold", "depends"]
WORDS: tuple[Word, ...] = ("holds", "does not hold", "depends")


@dataclass(frozen=True)
class Verdict:
    """What the figures say; `on` is what it depends on, or how far it holds."""

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


def _none(lab: "Lab") -> Iterable[Point]:
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
    points: Callable[["Lab"], Iterable[Point]] = _none  # the trained models it asks for
    timed: bool = False  # it measures time or memory: alone on the machine, and never twice the same
    on: Callable[["AnyModel", Any], Figures] | None = None  # the same for a model and a text that are given
    also: Callable[[], str] = str  # what else decides its figures, as what is installed
    ends: str = "95 %"  # what `low` and `high` of its figures are
