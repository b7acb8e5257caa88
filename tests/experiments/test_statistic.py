import json
import math

import pytest

from headwise.errors import HeadwiseError
from headwise.experiments.engine.statistic import Statistic, StatisticTable


def test_statistic_three_seeds_student_interval():
    # t(0.975, 2) = 4.302653 in every table of Student's distribution; 1, 2, 3 have sd 1.
    statistic = Statistic.mean_of([1.0, 2.0, 3.0])
    assert statistic.mean == 2
    assert statistic.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert statistic.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)


def test_statistic_one_seed_has_no_interval():
    statistic = Statistic.mean_of(1.5)
    assert statistic.low is None
    assert statistic.is_interval_above(1)
    assert statistic.is_interval_below(2)
    assert not statistic.is_interval_above(1.5)


def test_statistic_above_requires_full_interval():
    assert not Statistic.mean_of([0.1, 0.2, 0.3]).is_interval_above(0)
    assert Statistic.mean_of([0.19, 0.2, 0.21]).is_interval_above(0)
    assert Statistic.with_interval(1.0, 0.9, 1.2).is_interval_above(0.8)


def test_statistic_table_infinite_values_round_trip():
    statistics = (
        StatisticTable()
        .add("loss", "1 head", [math.inf, 2.0])
        .add("loss", 8, 2.0)
        .add("gap", None, [-math.inf, -math.inf])
    )
    rows = json.loads(json.dumps(statistics.to_rows(), allow_nan=False))
    loaded = StatisticTable.from_rows(rows)
    assert loaded["loss", "1 head"].values == (math.inf, 2.0)
    assert loaded["gap"].mean == -math.inf
    assert loaded.to_rows() == statistics.to_rows()


def test_statistic_partly_diverged_is_never_sure():
    partly_diverged, all_diverged = Statistic.mean_of([math.inf, 2.0, 2.0]), Statistic.mean_of([math.inf] * 3)
    assert not partly_diverged.is_interval_above(0)
    assert not partly_diverged.is_interval_below(100)
    assert all_diverged.is_interval_above(100)
    assert Statistic.mean_of(math.inf).is_interval_above(100)


def test_statistic_table_missing_name_raises():
    with pytest.raises(HeadwiseError, match="'gain' at condition None does not exist"):
        StatisticTable().add("loss", 1, 1.0)["gain"]
    with pytest.raises(HeadwiseError, match="at least one value"):
        Statistic.mean_of([])


def test_statistic_turns_median_interval_by_ranks():
    # The k-th smallest to the k-th largest of n rounds miss the median with 2 · Σ_{i<k} C(n, i) / 2ⁿ: for 9
    # 2/512 at k = 1, 20/512 at k = 2, 92/512 at k = 3; at most 0.05 is missed at k = 2, at most 0.01 at k = 1.
    statistic = Statistic.median_of([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 100.0])
    assert (statistic.mean, statistic.low, statistic.high) == (6, 2, 9)
    assert (statistic.at_confidence_level(0.99).low, statistic.at_confidence_level(0.99).high) == (1, 100)
    few = Statistic.median_of([1.0, 2.0, 3.0])  # 2/8: never sure
    assert not few.is_interval_above(0)
    assert not few.is_interval_below(100)


def test_statistic_table_together_corrects_intervals():
    # Student's t of 2 degrees in closed form: t = (2p − 1) / √(2p(1 − p)); four intervals: p = 1 − 0.05/8.
    p = 1 - 0.05 / 8
    statistics = StatisticTable().add("other", None, [1.0, 2.0, 3.0]).add("one value", None, 1.0)
    for name in "abcd":
        statistics.add("lost", name, [1.0, 2.0, 3.0])
    corrected = statistics.bonferroni([("lost", name) for name in "abcd"] + [("one value", None), ("not there", None)])
    half_width = (2 * p - 1) / math.sqrt(2 * p * (1 - p)) / math.sqrt(3)
    assert corrected["lost", "c"].high == pytest.approx(2 + half_width)
    assert corrected["lost", "c"].level == pytest.approx(1 - 0.05 / 4)
    assert corrected["other"] == statistics["other"]
    assert statistics["lost", "c"].level == 0.95  # not judged, so not corrected


def test_statistic_known_interval_widens_as_normal():
    # z at 0.975 is 1.959964, at 0.9875 it is 2.241403.
    statistic = Statistic.with_interval(1.0, 0.9, 1.3).at_confidence_level(0.975)
    assert statistic.low == pytest.approx(1 - 0.1 * 2.241403 / 1.959964, abs=1e-6)
    assert statistic.high == pytest.approx(1 + 0.3 * 2.241403 / 1.959964, abs=1e-6)


def test_statistic_spreads_use_f_distribution():
    # F of 2 and 2 degrees has quantile q / (1 − q): 39 at 0.975, 79 at 0.9875.
    statistic = Statistic.spread_ratio([0.0, 1.0, 2.0], [0.0, 0.1, 0.2])
    assert statistic.mean == pytest.approx(10)
    assert statistic.low == pytest.approx(10 / math.sqrt(39))
    assert statistic.at_confidence_level(0.975).low == pytest.approx(10 / math.sqrt(79))
    assert statistic.is_interval_above(1)
    with pytest.raises(HeadwiseError, match="Got 3 and 2"):
        Statistic.spread_ratio([1.0, 2.0, 3.0], [1.0, 2.0])
