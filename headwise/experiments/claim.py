"""A claim: one statement, an experiment that measures it, and a rule that turns statistics into a verdict."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.experiments.engine.experiment_config import ExperimentConfig
from headwise.experiments.engine.statistic import Condition, StatisticTable

if TYPE_CHECKING:
    from headwise.experiments.trained_model_provider import TrainedModelProvider
    from headwise.model import ModelProtocol

VerdictWord = Literal["holds", "does not hold", "depends", "true by construction", "undecided"]
# Verdicts of a claim that the measurements can contradict.
EMPIRICAL_VERDICTS: tuple[VerdictWord, ...] = ("holds", "does not hold", "depends", "undecided")
VERDICTS: tuple[VerdictWord, ...] = (*EMPIRICAL_VERDICTS, "true by construction")


@dataclass(frozen=True)
class Verdict:
    """Outcome of a claim.

    `true by construction` is not evidence. The algebra of the layer implies the claim, so measuring it only tests this code.
    `depends` names the factor that the verdict depends on. `undecided` means that an interval includes its threshold, so that
    more seeds or measurements are needed.

    Attributes:
        word: The verdict.
        detail: Factor that the verdict depends on, the inconclusive quantity, or the scope.
    """

    word: VerdictWord
    detail: str = ""

    def __str__(self) -> str:
        return self.word if not self.detail else f"{self.word}: {self.detail}"


@dataclass(frozen=True)
class PrimaryQuantity:
    """The one quantity that decides a claim. All other quantities of the claim are secondary.

    It is decided by its own 95% interval over seeds, without a correction, because a claim has one primary quantity.

    Attributes:
        statistic: Name of the statistic.
        condition: Its condition.
        threshold: Threshold between the verdicts.
        direction: "above" if the claim says that the quantity exceeds the threshold, else "below".
        planned_seeds: Number of seeds by the power calculation (docs/research/claims-plan.md).
    """

    statistic: str
    condition: Condition
    threshold: float
    direction: Literal["above", "below"]
    planned_seeds: int

    @property
    def key(self) -> tuple[str, Condition]:
        """Key in a statistic table."""
        return self.statistic, self.condition

    @property
    def rule(self) -> str:
        """The rule in one sentence."""
        where = "" if self.condition is None else f" ({self.condition})"
        return (
            f"Primary quantity: {self.statistic}{where}. Holds if its 95% interval over seeds is {self.direction} "
            f"{self.threshold:g}, does not hold if it is on the other side, else undecided."
        )

    def judge(self, statistics: StatisticTable) -> Verdict:
        """Return the verdict of the primary quantity."""
        statistic = statistics[self.key]
        is_above, is_below = statistic.is_interval_above(self.threshold), statistic.is_interval_below(self.threshold)
        confirmed, refuted = (is_above, is_below) if self.direction == "above" else (is_below, is_above)
        detail = f"{self.statistic}: {statistic}, threshold {self.threshold:g}"
        return Verdict("holds" if confirmed else "does not hold" if refuted else "undecided", detail)


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
        primary: Quantity that decides the claim if it was measured. Otherwise `judge` decides.
        extra_key: Further input of the result key, for example the installed pretrained model.
        version: Version of `measure`. Increase it if `measure` returns different numbers (see declared_code_versions.py).
    """

    number: int
    name: str
    statement: str
    counterevidence: str
    setup: str
    rule: str
    measure: Callable[["TrainedModelProvider"], StatisticTable]
    judge: Callable[[StatisticTable], Verdict]
    plot: PlotSpec
    judged: JudgedStatistics = _empty
    possible_verdicts: tuple[VerdictWord, ...] = EMPIRICAL_VERDICTS
    identity: str = ""
    training_configs: Callable[["TrainedModelProvider"], Iterable[ExperimentConfig]] = _empty
    timed: bool = False
    measure_model: Callable[["ModelProtocol", Any], StatisticTable] | None = None
    primary: PrimaryQuantity | None = None
    extra_key: Callable[[], str] = str
    version: int = 1

    def correct_and_judge(self, statistics: StatisticTable) -> tuple[StatisticTable, Verdict]:
        """Apply the rule of the primary quantity if there is one, otherwise that of all quantities with corrected intervals.

        With a primary quantity, the verdict of the other rule on corrected intervals is a secondary finding in the detail.
        """
        corrected = statistics.bonferroni(self.judged(statistics))
        verdict = self.judge(corrected)
        if self.primary is None or self.primary.key not in statistics:
            return corrected, verdict
        primary = self.primary.judge(statistics)
        return corrected, Verdict(primary.word, f"{primary.detail}. Secondary quantities: {verdict}")

    @property
    def full_rule(self) -> str:
        """The primary rule, if there is one, and the rule of all quantities."""
        return self.rule if self.primary is None else f"{self.primary.rule} Secondary rule: {self.rule}"
