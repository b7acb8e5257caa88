"""A claim: one sentence, an experiment, and a rule that turns figures into a verdict."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable

if TYPE_CHECKING:
    from headwise.experiments.experiment_context import ExperimentContext
    from headwise.model import ModelProtocol

VerdictWord = Literal["holds", "does not hold", "depends", "true by construction"]
# What figures can say of a claim that might be wrong.
EMPIRICAL_VERDICTS: tuple[VerdictWord, ...] = ("holds", "does not hold", "depends")
VERDICTS: tuple[VerdictWord, ...] = (*EMPIRICAL_VERDICTS, "true by construction")


@dataclass(frozen=True)
class Verdict:
    """What the figures say; `detail` is what it depends on, or how far it holds.

    `true by construction` is no evidence: the algebra of a layer says so before anything is measured, and measuring it
    tests this code.
    """

    word: VerdictWord
    detail: str = ""

    def __str__(self) -> str:
        return self.word if not self.detail else f"{self.word}: {self.detail}"


@dataclass(frozen=True)
class PlotSpec:
    """Which figures are drawn: lines where they were measured at numbers, bars where at names."""

    statistics: tuple[str, ...]
    x: str = ""
    y: str = ""
    log_x: bool = False  # the x axis grows by factors


JudgedStatistics = Callable[[StatisticTable], Iterable[tuple[str, Condition]]]


def statistic_key_selector(*names: str) -> JudgedStatistics:
    """All figures of these names: what most rules look at.

    >>> list(statistic_key_selector("lost")(StatisticTable().add("lost", "a", 1.0).add("loss", "a", 2.0)))
    [('lost', 'a')]
    """
    return lambda statistics: ((name, condition) for name in names for condition in statistics.by_condition(name))


def format_labeled_lists(lists: Mapping[str, Sequence[str]]) -> str:
    """What was found of several things, in a line; empty lists are left out.

    >>> format_labeled_lists({"shown": ["local early"], "open": [], "not so": ["semantic late", "long range late"]})
    'shown: local early; not so: semantic late, long range late'
    """
    return "; ".join(f"{label}: {', '.join(items)}" for label, items in lists.items() if items)


def _empty(ignored: Any) -> tuple[()]:
    return ()


@dataclass(frozen=True)
class Claim:
    """One file of claims/ has one of these, called CLAIM."""

    number: int
    name: str
    statement: str  # the claim, as guides make it
    counterevidence: str  # what would count against it
    setup: str
    rule: str  # how the verdict follows from the figures
    measure: Callable[["ExperimentContext"], StatisticTable]
    judge: Callable[[StatisticTable], Verdict]
    plot: PlotSpec
    judged: JudgedStatistics = _empty  # the figures whose intervals the rule looks at: they are made to hold together
    possible_verdicts: tuple[VerdictWord, ...] = EMPIRICAL_VERDICTS  # the verdicts its rule can reach
    identity: str = ""  # what of it is true by construction, and so is no finding
    training_configs: Callable[["ExperimentContext"], Iterable[ExperimentConfig]] = (
        _empty  # the trained models it asks for
    )
    timed: bool = False  # it measures time or memory: alone on the machine, and never twice the same
    measure_model: Callable[["ModelProtocol", Any], StatisticTable] | None = None  # the same for a model that is given
    extra_key: Callable[[], str] = str  # what else decides its figures, as what is installed
    version: int = 1  # of `measure`: raised when it gives other figures, as said in versions.py

    def correct_and_judge(self, statistics: StatisticTable) -> tuple[StatisticTable, Verdict]:
        """The figures with the intervals the rule looks at made to hold together, and what it says of them."""
        corrected = statistics.bonferroni(self.judged(statistics))
        return corrected, self.judge(corrected)
