"""Scores of all heads on all examples, and the test of every head on the reporting half.

Heads are chosen on the selection half and judged on the reporting half. The baseline of a head is the one that is largest on
the selection half. All heads that were tried are one family of a max-T sign-flip test over the mean differences of inputs. In
the test each input counts once, whatever its number of rows, so that one long input does not decide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headwise.analysis.finding.gold_pair_scores import ExampleScores
from headwise.analysis.metrics.statistics import (
    bootstrap_difference_interval,
    bootstrap_interval,
    max_t_test,
)
from headwise.analysis.recording.text_hash_split import REPORTING, SELECTION

LEVELS = ("none", "attention", "value-weighted", "causal")
ALPHA = 0.05
POSITION_RULES = ("offset", "rank", "candidate", "diagonal")  # only the best of them is a baseline
NO_INTERVAL = (float("nan"), float("nan"))


@dataclass(frozen=True, eq=False)
class PerInputScores:
    """Sums by unit (input of the model) and head.

    Attributes:
        keys: Key of each unit.
        halves: Half of each unit, (n,).
        counts: Number of rows, (n,).
        scores: Sums of scores, (n, H).
        value_weighted: Sums of value-weighted scores, (n, H). NaN if unmeasured.
        weights: Sums of attention weights on the gold keys, (n, H).
        baselines: Sums of each baseline by name, (n, H) or (n, 1).
        is_bounded: Whether 1 is the largest score, so that a gain is a fraction of the room above the baseline.
    """

    keys: tuple[str, ...]
    halves: np.ndarray
    counts: np.ndarray
    scores: np.ndarray
    value_weighted: np.ndarray
    weights: np.ndarray
    baselines: dict[str, np.ndarray]
    is_bounded: bool = True

    def in_half(self, half: int) -> np.ndarray:
        """Return the mask of the units in a half that have rows, (n,)."""
        return (self.halves == half) & (self.counts > 0)

    def mean(self, sums: np.ndarray, half: int) -> np.ndarray:
        """Return the mean over the rows of one half, (H,). NaN without rows."""
        units = self.in_half(half)
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums[units].sum(0) / self.counts[units].sum()


@dataclass(frozen=True)
class JobEvidence:
    """Evidence that one head does a job. Scores are those of the reporting half, unless a name says otherwise.

    Attributes:
        address: Address of the head.
        evidence_level: "none", "attention", "value-weighted" or "causal".
        score: Score: fraction of hits, accuracy, or effect.
        interval: 95% confidence interval of the score.
        baseline: Score of the baseline.
        baseline_name: The baseline that is largest on the selection half.
        excess_interval: 95% confidence interval of score minus baseline, paired by input.
        gain: (score − baseline) / (1 − baseline), or score − baseline for the job `effect`.
        p: p-value of the score against the baseline, corrected for all heads that were tried.
        selection_score: Score on the selection half.
        selection_gain: Gain on the selection half.
        value_weighted: Score with value-weighted attention. NaN if it is not defined.
        weight: Mean attention weight on the gold keys. NaN if it is not defined.
        detail: Feature of the head that is scored, for the job `classes`.
        cost: Loss of the metric without the head. None if it was not ablated.
        cost_interval: 95% confidence interval of `cost`.
        other_cost: Mean loss of the metric without another head of the layer.
        cost_excess_interval: 95% confidence interval of `cost` minus `other_cost`.
    """

    address: str
    evidence_level: str
    score: float
    interval: tuple[float, float]
    baseline: float
    baseline_name: str
    excess_interval: tuple[float, float]
    gain: float
    p: float
    selection_score: float
    selection_gain: float
    value_weighted: float = float("nan")
    weight: float = float("nan")
    detail: str = ""
    cost: float | None = None
    cost_interval: tuple[float, float] | None = None
    other_cost: float | None = None
    cost_excess_interval: tuple[float, float] | None = None

    @property
    def is_supported(self) -> bool:
        """Whether the head does the job: its evidence level is above `none`."""
        return self.evidence_level != LEVELS[0]

    @property
    def sort_key(self) -> tuple[int, float]:
        """Key by which heads are ranked: evidence level, then gain."""
        return LEVELS.index(self.evidence_level), self.gain if np.isfinite(self.gain) else -np.inf


@dataclass(frozen=True)
class BestHeadComparison:
    """Scores of the other heads on the reporting half, as a control for the head that was chosen on the selection half.

    Attributes:
        address: The head with the largest gain on the selection half.
        score: Its score.
        interval: 95% confidence interval of its score.
        random_score: Mean score of the other heads, which is the expected score of a random head.
        excess_interval: 95% confidence interval of `score` minus `random_score`, paired by input.
        median: Median score of the other heads.
        second: Largest score of another head.
        second_address: That head.
    """

    address: str
    score: float
    interval: tuple[float, float]
    random_score: float
    excess_interval: tuple[float, float]
    median: float
    second: float
    second_address: str


def sum_scores_by_input(
    rows: Sequence[ExampleScores], half_of: Mapping[str, int], *, is_bounded: bool = True
) -> PerInputScores:
    """Add up examples with equal inputs, and choose the position rule on the selection half."""
    keys = tuple(dict.fromkeys(row.key for row in rows))
    index = np.array([keys.index(row.key) for row in rows])
    halves = np.array([half_of[key] for key in keys])

    def total(values: Sequence[Sequence[float]]) -> np.ndarray:
        array = np.array(values, float).reshape(len(rows), -1)
        summed = np.zeros((len(keys), array.shape[1]))
        np.add.at(summed, index, array)
        return summed

    counts = total([[row.count] for row in rows])[:, 0]
    baselines = {name: total([row.baselines[name] for row in rows]) for name in rows[0].baselines}
    rules = {name: total([[row.rules.get(name, 0.0)] for row in rows]) for name in _rule_names(rows)}
    position = [name for name in rules if name.startswith(POSITION_RULES)]
    selected = (halves == SELECTION) & (counts > 0)
    if position:
        best = max(position, key=lambda name: rules[name][selected].sum())
        baselines[best] = rules[best]
    baselines |= {name: rules[name] for name in rules if name not in position}
    return PerInputScores(
        keys, halves, counts, total([row.scores for row in rows]), total([row.value_weighted for row in rows]),
        total([row.weights for row in rows]), baselines, is_bounded,
    )  # fmt: skip


def _rule_names(rows: Sequence[ExampleScores]) -> list[str]:
    return sorted({name for row in rows for name in row.rules})


@dataclass(frozen=True, eq=False)
class AllHeadsTestResult:
    """Result of the test of all heads.

    Attributes:
        evidence: Evidence for each head, in the order of the table.
        family_size: Number of tests for which p-values are corrected.
        control: Comparison of the chosen head with random heads.
    """

    evidence: list[JobEvidence]
    family_size: int
    control: BestHeadComparison
    details: list[str] = field(default_factory=list)


def assess_heads(
    table: PerInputScores, addresses: Sequence[object], threshold: float, *, seed: int = 0, details: Sequence[str] = ()
) -> AllHeadsTestResult:
    """Test every head on the reporting half, against the baseline that is largest on the selection half."""
    names, chosen = list(table.baselines), best_baseline_indices(table)
    baselines = chosen_baselines(table)
    selection_gain = _gain(table, table.scores, baselines, SELECTION)
    gain = _gain(table, table.scores, baselines, REPORTING)
    weighted_gain = _gain(table, table.value_weighted, baselines, REPORTING)
    units = table.in_half(REPORTING)
    counts = np.broadcast_to(table.counts[units][:, None], table.scores[units].shape)
    rows = table.counts[units][:, None]
    p, family_size = max_t_test(table.scores[units] / rows, baselines[units] / rows, np.ones_like(counts), seed=seed)
    weighted_p = _value_weighted_p(table, baselines, units, seed)
    low, high = bootstrap_interval(table.scores[units], counts, seed=seed)
    difference = bootstrap_difference_interval(table.scores[units], counts, baselines[units], counts, seed=seed)
    score, baseline = table.mean(table.scores, REPORTING), table.mean(baselines, REPORTING)
    weighted, weight = table.mean(table.value_weighted, REPORTING), table.mean(table.weights, REPORTING)
    selection_score = table.mean(table.scores, SELECTION)
    supported = (p < ALPHA) & (gain >= threshold) & (selection_gain >= threshold) & (difference[0] > 0)
    value_supported = supported & (weighted_p < ALPHA) & (weighted_gain >= threshold)
    evidence = [
        JobEvidence(
            str(address), LEVELS[int(supported[h]) + int(value_supported[h])], float(score[h]),
            (float(low[h]), float(high[h])), float(baseline[h]), names[chosen[h]],
            (float(difference[0][h]), float(difference[1][h])), float(gain[h]), float(p[h]), float(selection_score[h]),
            float(selection_gain[h]), float(weighted[h]), float(weight[h]), details[h] if details else "",
        )
        for h, address in enumerate(addresses)
    ]  # fmt: skip
    return AllHeadsTestResult(
        evidence, family_size, _compare_best_with_other_heads(table, addresses, selection_gain, seed)
    )


def best_baseline_indices(table: PerInputScores) -> np.ndarray:
    """Return the index of the baseline that is largest on the selection half, for each head, (H,)."""
    columns = [np.broadcast_to(sums, table.scores.shape) for sums in table.baselines.values()]
    on_selection = np.stack([table.mean(column, SELECTION) for column in columns])
    return np.nan_to_num(on_selection, nan=-np.inf).argmax(0)


def chosen_baselines(table: PerInputScores) -> np.ndarray:
    """Return the sums of each head's baseline, (n, H)."""
    columns = np.stack([np.broadcast_to(sums, table.scores.shape) for sums in table.baselines.values()])
    return np.take_along_axis(columns, best_baseline_indices(table)[None, None, :], 0)[0]


def _gain(table: PerInputScores, sums: np.ndarray, baselines: np.ndarray, half: int) -> np.ndarray:
    """Return the gain over the baseline on one half, (H,)."""
    score, baseline = table.mean(sums, half), table.mean(baselines, half)
    if not table.is_bounded:
        return score - baseline
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(baseline < 1, (score - baseline) / (1 - baseline), 0.0)


def _value_weighted_p(table: PerInputScores, baselines: np.ndarray, units: np.ndarray, seed: int) -> np.ndarray:
    """Return p-values of the value-weighted scores, (H,). 1 if they are not defined."""
    rows = table.counts[units][:, None]
    measured = np.isfinite(table.value_weighted[units])
    means = np.where(measured, table.value_weighted[units] / rows, 0.0)
    return max_t_test(means, np.where(measured, baselines[units] / rows, 0.0), measured.astype(float), seed=seed)[0]


def _compare_best_with_other_heads(
    table: PerInputScores, addresses: Sequence[object], selection_gain: np.ndarray, seed: int
) -> BestHeadComparison:
    """Compare the head with the largest gain on the selection half with the mean of the other heads."""
    best = int(np.nan_to_num(selection_gain, nan=-np.inf).argmax())
    others = np.arange(len(addresses)) != best
    units = table.in_half(REPORTING)
    counts, score = table.counts[units], table.mean(table.scores, REPORTING)
    low, high = bootstrap_interval(table.scores[units, best], counts, seed=seed)
    if not others.any():
        nan = float("nan")
        return BestHeadComparison(
            str(addresses[best]), float(score[best]), (float(low), float(high)), nan, NO_INTERVAL, nan, nan, ""
        )
    mean_of_others = table.scores[units][:, others].mean(1)
    difference = bootstrap_difference_interval(table.scores[units, best], counts, mean_of_others, counts, seed=seed)
    second = int(np.where(others, score, -np.inf).argmax())
    return BestHeadComparison(
        str(addresses[best]), float(score[best]), (float(low), float(high)), float(score[others].mean()),
        (float(difference[0]), float(difference[1])), float(np.median(score[others])), float(score[second]),
        str(addresses[second]),
    )  # fmt: skip
