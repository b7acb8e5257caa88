"""Page data of claims: the plots, the command that reruns a claim, and a report with claims only."""

import json
import math
from dataclasses import replace

import pytest

from headwise.experiments.claim import Claim, PlotSpec, Verdict
from headwise.experiments.claim_tests.kernels_agree import CLAIM as SAME
from headwise.experiments.claim_tests.parameter_count import CLAIM as PARAMETERS
from headwise.experiments.engine.statistic import Statistic, StatisticTable
from headwise.experiments.run_claims import ClaimResult
from headwise.ui.claims_page_data import claim_dicts, claims_report_data
from headwise.ui.report import render_report_html

FULL = (0, 1, 2)


def make_result(seeds: tuple[int, ...] = FULL, model_name: str = "") -> ClaimResult:
    statistics = (
        StatisticTable().add("parameters", 8, 100).add("parameters", 2, 100).add("most over fewest", "plain", 1)
    )
    return ClaimResult(PARAMETERS, statistics, Verdict("depends", "on gates"), seeds, model_name)


def plot_data(statistics: StatisticTable, plot: PlotSpec, claim: Claim = PARAMETERS) -> dict:
    (claim_data,) = claim_dicts([ClaimResult(replace(claim, plot=plot), statistics, Verdict("holds"), FULL)])
    return claim_data["plot"]


def test_claim_dicts_contain_full_result():
    result = make_result()
    (claim_data,) = claim_dicts([result])
    assert {key: claim_data[key] for key in result.to_dict()} == result.to_dict()
    assert set(claim_data) - set(result.to_dict()) == {"plot"}


def test_claim_dicts_numeric_positions_are_sorted_lines():
    (claim_data,) = claim_dicts([make_result()])
    assert claim_data["plot"] == {
        "x": "heads", "y": "parameters of a layer", "log": True,
        "series": [{"name": "parameters", "points": [[2, 100.0, None, None], [8, 100.0, None, None]]}],
    }  # fmt: skip


def test_claim_dicts_named_positions_are_bars_with_intervals():
    statistics = (
        StatisticTable().add("relative difference", "fused", [1.0, 2.0, 3.0]).add("relative difference", "batched", 0.5)
    )
    (claim_data,) = claim_dicts([ClaimResult(SAME, statistics, Verdict("holds"), FULL)])
    (bars,) = claim_data["plot"]["bars"]
    assert bars["name"] == "relative difference"
    half_width = (
        0.95 / math.sqrt(2 * 0.975 * 0.025) / math.sqrt(3)
    )  # Student's t with two degrees of freedom in closed form; standard deviation 1
    assert bars["rows"][0] == ["fused", 2.0, pytest.approx(2 - half_width), pytest.approx(2 + half_width)]
    assert bars["rows"][1] == ["batched", 0.5, None, None]
    assert (claim_data["plot"]["x"], claim_data["plot"]["y"]) == ("", "relative difference")


def test_claim_dicts_statistic_without_position_is_named_bar():
    statistics = StatisticTable().add("with", None, 0.9).add("without", None, Statistic.with_interval(0.2, 0.1, 0.3))
    bars = plot_data(statistics, PlotSpec(("without", "with", "never measured")))["bars"]
    assert bars == [
        {"name": "without", "rows": [["without", 0.2, 0.1, 0.3]]},
        {"name": "with", "rows": [["with", 0.9, None, None]]},
    ]


def test_claim_dicts_mixed_positions_are_bars():
    statistics = StatisticTable().add("loss", 8, 2.0).add("loss", "none", 3.0)
    assert plot_data(statistics, PlotSpec(("loss",)))["bars"][0]["rows"] == [
        ["8", 2.0, None, None],
        ["none", 3.0, None, None],
    ]


def test_claim_dicts_zero_position_disables_log_axis():
    statistics = StatisticTable().add("loss", 0, 2.0).add("loss", 4, 1.0)
    assert plot_data(statistics, PlotSpec(("loss",), log_x=True))["log"] is False


def test_claim_dicts_nothing_measured_gives_empty_plot():
    assert plot_data(StatisticTable().add("other", 1, 1.0), PlotSpec(("loss",))) == {"x": "", "y": "", "bars": []}


def test_claim_dicts_infinite_value_is_none():
    statistics = StatisticTable().add("loss", 1, [math.inf, 1.0]).add("loss", 2, 1.0)
    assert plot_data(statistics, PlotSpec(("loss",)))["series"][0]["points"][0] == [1, None, None, None]


def test_claims_report_data_has_no_heads():
    report_data = claims_report_data(iter([make_result(), make_result((0,), "gpt2")]))
    assert (report_data["heads"], report_data["model"]["heads"], report_data["model"]["name"]) == ([], 0, "gpt2")
    assert len(report_data["claims"]) == 2
    assert json.loads(json.dumps(report_data, allow_nan=False)) == report_data
    assert "on gates" in render_report_html(report_data)
