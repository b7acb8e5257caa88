import json
import math

import pytest

from headwise.errors import HeadwiseError
from headwise.experiments.engine.statistic import Figure, Figures


def test_student_interval_of_three_seeds():
    # t(.975, 2) = 4.302653 in every table of Student's distribution; 1, 2, 3 have sd 1.
    made = Figure.over([1.0, 2.0, 3.0])
    assert made.mean == 2
    assert made.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert made.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)


def test_one_seed_has_no_interval_and_is_judged_by_itself():
    made = Figure.over(1.5)
    assert made.low is None
    assert made.above(1)
    assert made.below(2)
    assert not made.above(1.5)


def test_an_interval_that_reaches_the_bar_is_not_above_it():
    assert not Figure.over([0.1, 0.2, 0.3]).above(0)
    assert Figure.over([0.19, 0.2, 0.21]).above(0)
    assert Figure.known(1.0, 0.9, 1.2).above(0.8)


def test_a_run_that_diverged_survives_being_written():
    made = Figures().add("loss", "1 head", [math.inf, 2.0]).add("loss", 8, 2.0).add("gap", None, [-math.inf, -math.inf])
    rows = json.loads(json.dumps(made.to_rows(), allow_nan=False))
    back = Figures.from_rows(rows)
    assert back["loss", "1 head"].values == (math.inf, 2.0)
    assert back["gap"].mean == -math.inf
    assert back.to_rows() == made.to_rows()


def test_with_a_run_that_diverged_nothing_is_sure_unless_all_did():
    some, every = Figure.over([math.inf, 2.0, 2.0]), Figure.over([math.inf] * 3)
    assert not some.above(0)
    assert not some.below(100)
    assert every.above(100)
    assert Figure.over(math.inf).above(100)


def test_what_is_not_there_is_said():
    with pytest.raises(HeadwiseError, match="no figure 'gain' at None; there is loss"):
        Figures().add("loss", 1, 1.0)["gain"]
    with pytest.raises(HeadwiseError, match="at least one value"):
        Figure.over([])


def test_the_median_of_turns_by_ranks():
    # Of n turns the k-th smallest to the k-th largest miss the median with 2 · Σ_{i<k} C(n, i) / 2ⁿ: for 9 turns
    # 2/512 at k = 1, 20/512 at k = 2, 92/512 at k = 3; at most .05 is missed at k = 2, at most .01 at k = 1.
    made = Figure.turns([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 100.0])
    assert (made.mean, made.low, made.high) == (6, 2, 9)
    assert (made.at_level(0.99).low, made.at_level(0.99).high) == (1, 100)
    few = Figure.turns([1.0, 2.0, 3.0])  # 2/8: never sure
    assert not few.above(0)
    assert not few.below(100)


def test_intervals_of_a_rule_hold_together():
    # Student's t of 2 degrees in closed form: t = (2p − 1) / √(2p(1 − p)). Of four intervals, p = 1 − .05/8.
    p = 1 - 0.05 / 8
    found = Figures().add("other", None, [1.0, 2.0, 3.0]).add("one value", None, 1.0)
    for name in "abcd":
        found.add("lost", name, [1.0, 2.0, 3.0])
    wide = found.together([("lost", name) for name in "abcd"] + [("one value", None), ("not there", None)])
    half = (2 * p - 1) / math.sqrt(2 * p * (1 - p)) / math.sqrt(3)
    assert wide["lost", "c"].high == pytest.approx(2 + half)
    assert wide["lost", "c"].level == pytest.approx(1 - 0.05 / 4)
    assert wide["other"] == found["other"]
    assert found["lost", "c"].level == 0.95  # what was measured stays


def test_known_ends_are_widened_as_normal_ones():
    # z at .975 is 1.959964, at .9875 it is 2.241403.
    made = Figure.known(1.0, 0.9, 1.3).at_level(0.975)
    assert made.low == pytest.approx(1 - 0.1 * 2.241403 / 1.959964, abs=1e-6)
    assert made.high == pytest.approx(1 + 0.3 * 2.241403 / 1.959964, abs=1e-6)


def test_spreads_are_compared_by_fishers_f():
    # F of 2 and 2 degrees has quantile q / (1 − q): 39 at .975, 79 at .9875.
    made = Figure.spreads([0.0, 1.0, 2.0], [0.0, 0.1, 0.2])
    assert made.mean == pytest.approx(10)
    assert made.low == pytest.approx(10 / math.sqrt(39))
    assert made.at_level(0.975).low == pytest.approx(10 / math.sqrt(79))
    assert made.above(1)
    with pytest.raises(HeadwiseError, match="as many values each; got 3 and 2"):
        Figure.spreads([1.0, 2.0, 3.0], [1.0, 2.0])
