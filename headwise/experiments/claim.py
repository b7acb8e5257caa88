"""A claim: one statement, an experiment that measures it, and a rule that turns statistics into a verdict."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable

if TYPE_CHECKING:
    from headwise.experiments.experiment_context import ExperimentContext
    from headwise.model import ModelProtocol

VerdictWord = Literal["holds", "does not hold", "depends", "true by construction"]
# Verdicts of a claim that the measurements can contradict.
EMPIRICAL_VERDICTS: tuple[VerdictWord, ...] = ("holds", "does not hold", "depends")
VERDICTS: tuple[VerdictWord, ...] = (*EMPIRICAL_VERDICTS, "true by construction")


@dataclass(frozen=True)
class Verdict:
    """Outcome of a claim.

    `true by construction` is not evidence. The algebra of the layer implies the claim, so measuring it only tests this code.

    Attributes:
        word: The verdict.
        detail: Conditions that the verdict depends on, or its scope.
    """

    word: VerdictWord
    detail: str = ""

    def __str__(self) -> str:
        return self.word if not self.detail else f"{self.word}: {self.detail}"


@dataclass(frozen=True)
class PlotSpec:
    """Statistics to plot: lines if the conditions are numbers, bars if they are names.

    Attributes:
        statistics: Names of the statistics.
        x: Label of the x axis.
        y: Label of the y axis.
        log_x: Use a logarithmic x axis.
    """

    statistics: tuple[str, ...]
    x: str = ""
    y: str = ""
    log_x: bool = False


JudgedStatistics = Callable[[StatisticTable], Iterable[tuple[str, Condition]]]


def statistic_key_selector(*names: str) -> JudgedStatistics:
    """Return a function that selects all statistics with these names. Most rules use it.

    >>> list(statistic_key_selector("lost")(StatisticTable().add("lost", "a", 1.0).add("loss", "a", 2.0)))
    [('lost', 'a')]
    """
    return lambda statistics: ((name, condition) for name in names for condition in statistics.by_condition(name))


def format_labeled_lists(lists: Mapping[str, Sequence[str]]) -> str:
    """Join labeled lists into one line. Empty lists are omitted.

    >>> format_labeled_lists({"shown": ["local early"], "open": [], "not so": ["semantic late", "long range late"]})
    'shown: local early; not so: semantic late, long range late'
    """
    return "; ".join(f"{label}: {', '.join(items)}" for label, items in lists.items() if items)


def _empty(ignored: Any) -> tuple[()]:
    return ()


@dataclass(frozen=True)
class Claim:
    """A claim and its test. Each module of `claim_tests` defines one as CLAIM.

    Attributes:
        number: Number of the claim.
        name: Name on the command line.
        statement: The claim in one sentence.
        counterevidence: Result that would contradict the claim.
        setup: How the claim is measured.
        rule: How the verdict follows from the statistics.
        measure: Function that runs the experiment.
        judge: Function that applies the rule.
        plot: Statistics to plot.
        judged: Selects the statistics whose intervals the rule uses. These intervals get a Bonferroni correction.
        possible_verdicts: Verdicts that the rule can return.
        identity: The part of the claim that is true by construction and therefore is not a finding.
        training_configs: Configurations of the trained models that the claim needs.
        timed: True if the claim measures time or memory. It then runs alone, and its results vary between runs.
        measure_model: Function that runs the experiment on a given model, or None if the claim cannot be tested on one.
        extra_key: Further input of the result key, for example the installed pretrained model.
        version: Version of `measure`. Increase it if `measure` returns different numbers (see declared_code_versions.py).
    """

    number: int
    name: str
    statement: str
    counterevidence: str
    setup: str
    rule: str
    measure: Callable[["ExperimentContext"], StatisticTable]
    judge: Callable[[StatisticTable], Verdict]
    plot: PlotSpec
    judged: JudgedStatistics = _empty
    possible_verdicts: tuple[VerdictWord, ...] = EMPIRICAL_VERDICTS
    identity: str = ""
    training_configs: Callable[["ExperimentContext"], Iterable[ExperimentConfig]] = _empty
    timed: bool = False
    measure_model: Callable[["ModelProtocol", Any], StatisticTable] | None = None
    extra_key: Callable[[], str] = str
    version: int = 1

    def correct_and_judge(self, statistics: StatisticTable) -> tuple[StatisticTable, Verdict]:
        """Apply the Bonferroni correction to the intervals that the rule uses, then apply the rule."""
        corrected = statistics.bonferroni(self.judged(statistics))
        return corrected, self.judge(corrected)
