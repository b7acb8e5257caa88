import json
import math

import pytest

from headwise.errors import HeadwiseError
from headwise.lab.figure import Figure, Figures


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
