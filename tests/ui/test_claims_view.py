"""Claims as the page is told them: the figures that are drawn, the command that repeats them, a book of them alone."""

import json
import math
from dataclasses import replace

import pytest

from headwise.experiments.claim import Claim, Picture, Verdict
from headwise.experiments.claims.parameters import CLAIM as PARAMETERS
from headwise.experiments.claims.same_numbers import CLAIM as SAME
from headwise.experiments.engine.statistic import Figure, Figures
from headwise.experiments.run import Result
from headwise.ui.claims_view import claims_book, tell
from headwise.ui.report import make_report

FULL = (0, 1, 2)


def parameters(seeds: tuple[int, ...] = FULL, on: str = "") -> Result:
    figures = Figures().add("parameters", 8, 100).add("parameters", 2, 100).add("most over fewest", "plain", 1)
    return Result(PARAMETERS, figures, Verdict("depends", "on gates"), seeds, on)


def drawn(figures: Figures, picture: Picture, claim: Claim = PARAMETERS) -> dict:
    (told,) = tell([Result(replace(claim, picture=picture), figures, Verdict("holds"), FULL)])
    return told["picture"]


def test_a_result_is_told_whole():
    result = parameters()
    (told,) = tell([result])
    assert {key: told[key] for key in result.to_dict()} == result.to_dict()
    assert set(told) - set(result.to_dict()) == {"picture"}


def test_figures_at_numbers_are_lines_from_left_to_right():
    (told,) = tell([parameters()])
    assert told["picture"] == {
        "x": "heads", "y": "parameters of a layer", "log": True,
        "series": [{"name": "parameters", "points": [[2, 100.0, None, None], [8, 100.0, None, None]]}],
    }  # fmt: skip


def test_figures_at_names_are_bars_with_their_intervals():
    figures = Figures().add("relative difference", "fused", [1.0, 2.0, 3.0]).add("relative difference", "batched", 0.5)
    (told,) = tell([Result(SAME, figures, Verdict("holds"), FULL)])
    (bars,) = told["picture"]["bars"]
    assert bars["name"] == "relative difference"
    half = 0.95 / math.sqrt(2 * 0.975 * 0.025) / math.sqrt(3)  # Student's t of two degrees, in closed form; spread 1
    assert bars["rows"][0] == ["fused", 2.0, pytest.approx(2 - half), pytest.approx(2 + half)]
    assert bars["rows"][1] == ["batched", 0.5, None, None]
    assert (told["picture"]["x"], told["picture"]["y"]) == ("", "relative difference")


def test_a_figure_at_nothing_is_a_bar_of_its_own_name():
    figures = Figures().add("with", None, 0.9).add("without", None, Figure.known(0.2, 0.1, 0.3))
    bars = drawn(figures, Picture(("without", "with", "never measured")))["bars"]
    assert bars == [
        {"name": "without", "rows": [["without", 0.2, 0.1, 0.3]]},
        {"name": "with", "rows": [["with", 0.9, None, None]]},
    ]


def test_numbers_beside_names_are_bars_too():
    figures = Figures().add("loss", 8, 2.0).add("loss", "none", 3.0)
    assert drawn(figures, Picture(("loss",)))["bars"][0]["rows"] == [["8", 2.0, None, None], ["none", 3.0, None, None]]


def test_zero_has_no_place_on_an_axis_of_doublings():
    figures = Figures().add("loss", 0, 2.0).add("loss", 4, 1.0)
    assert drawn(figures, Picture(("loss",), log=True))["log"] is False


def test_nothing_measured_is_nothing_drawn():
    assert drawn(Figures().add("other", 1, 1.0), Picture(("loss",))) == {"x": "", "y": "", "bars": []}


def test_what_is_infinite_is_told_as_none():
    figures = Figures().add("loss", 1, [math.inf, 1.0]).add("loss", 2, 1.0)
    assert drawn(figures, Picture(("loss",)))["series"][0]["points"][0] == [1, None, None, None]


def test_a_book_of_claims_has_no_heads_and_makes_a_report():
    book = claims_book(iter([parameters(), parameters((0,), "gpt2")]))
    assert (book["heads"], book["model"]["heads"], book["model"]["name"]) == ([], 0, "gpt2")
    assert len(book["claims"]) == 2
    assert json.loads(json.dumps(book, allow_nan=False)) == book
    assert "on gates" in make_report(book)
