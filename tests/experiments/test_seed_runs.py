"""Claims one seed at a time: files of figures, resume, merged verdicts and the status command."""

import json
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import HeadwiseError
from headwise.experiments import seed_runs
from headwise.experiments.engine.statistic import StatisticTable
from headwise.experiments.registry import find_claims
from headwise.experiments.run_claims import ClaimResult, claims
from headwise.experiments.seed_runs import judge_seeds, load_seed_files, planned_and_finished_seeds, run_seeds
from headwise.experiments.trained_model_provider import ExperimentSize
from tests.runner import run_command

LOSSES = {500: 0.03, 501: 0.031, 502: 0.029}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Replace the experiments by known figures. Return the list of measured claims and seeds."""
    calls: list[tuple[str, int]] = []

    def known_claims(names: list[str], *, first_seed: int, **options: Any) -> list[ClaimResult]:
        (claim,) = find_claims(names)
        calls.append((claim.name, first_seed))
        statistics = StatisticTable().add("nats of fewer heads above fewer layers", "at the end", LOSSES[first_seed])
        statistics.add("nats of fewer heads above fewer layers", "over training", LOSSES[first_seed])
        statistics.add("share of heads with a role", "trained", 0.9).add_proportion("right", 8, 0.5)
        statistics.add("share of heads with a role, gained", None, 0.5).add("relations followed, gained", None, 3)
        statistics.add("relations followed", "trained", 3)
        return [ClaimResult(claim, *claim.correct_and_judge(statistics), (first_seed,))]

    monkeypatch.setattr(seed_runs, "claims", known_claims)
    return calls


def test_seeds_are_written_resumed_and_judged_together(measured: list[tuple[str, int]], tmp_path: Path) -> None:
    folder = tmp_path / "seeds"
    run_seeds(["depth"], folder, seeds=2, first_seed=500)
    (result,) = run_seeds(["depth"], folder, seeds=3, first_seed=500)
    assert measured == [("depth", 500), ("depth", 501), ("depth", 502)]  # no seed twice
    assert result.statistics["nats of fewer heads above fewer layers", "at the end"].values == (0.03, 0.031, 0.029)
    assert (result.verdict.word, result.seeds) == ("holds", (500, 501, 502))  # 0.03 ± 0.0025 against 0.02
    assert result.has_few_seeds
    assert result.few_seeds_note == "3 of 10 planned seeds: indicative"
    data = json.loads((folder / "claims-seed-501.json").read_text())
    assert (data["seed"], data["size"]["width"]) == (501, 64)
    assert ["right", 8, 0.5, "proportion"] in data["claims"]["depth"]["rows"]
    run_seeds(["depth", "specialization"], folder, seeds=1, first_seed=500)
    assert measured[3:] == [("specialization", 500)]
    progress = {row.name: row for row in planned_and_finished_seeds(folder)}
    assert progress["depth"].finished == (500, 501, 502)
    assert progress["specialization"].finished == (500,)
    assert progress["pruning"].finished == ()
    assert [result.claim.name for result in judge_seeds(folder)] == ["specialization", "depth"]


def test_wrong_seed_files_raise(measured: list[tuple[str, int]], tmp_path: Path) -> None:
    with pytest.raises(HeadwiseError, match="one seed"):
        run_seeds(["depth"], tmp_path, seeds=0, first_seed=500)
    with pytest.raises(HeadwiseError, match="does not depend on a seed"):
        run_seeds(["bandwidth"], tmp_path, seeds=1, first_seed=500)
    run_seeds(["depth"], tmp_path, seeds=1, first_seed=500)
    with pytest.raises(HeadwiseError, match="another size"):
        run_seeds(["depth"], tmp_path, seeds=1, first_seed=500, size=ExperimentSize(width=16))
    (tmp_path / "claims-seed-7.json").write_text('{"seed": 7')
    with pytest.raises(HeadwiseError, match=r"claims-seed-7.*Delete it"):
        load_seed_files(tmp_path)


def test_status_command_prints_planned_and_finished_seeds(measured: list[tuple[str, int]], tmp_path: Path) -> None:
    run_seeds(["depth"], tmp_path, seeds=3, first_seed=500)
    rows = json.loads(run_command("claims", "--status", "--seed-files", str(tmp_path), "--json").output)
    assert {"name": "depth", "planned": 10, "finished": [500, 501, 502]} in rows
    table = run_command("claims", "depth", "--status", "--seed-files", str(tmp_path)).output
    assert "500–502" in table
    printed = run_command("claims", "depth", "--seed-files", str(tmp_path)).output  # judges, runs nothing
    assert "holds" in printed
    assert "is not a folder" in run_command("claims", "--status", "--seed-files", str(tmp_path / "none")).error_line
    assert "--seed-files" in run_command("claims", "--seed-files", str(tmp_path), "--full").error_line


@pytest.mark.slow
def test_merged_seeds_equal_claims_with_several_seeds(tmp_path: Path) -> None:
    size = ExperimentSize(width=16, heads=4, steps=16, batch_size=4, documents=30)
    options: dict[str, Any] = {"size": size, "cache": tmp_path / "cache", "processes": 1, "first_seed": 500}
    names = ["output-projection", "specialization"]
    merged = run_seeds(names, tmp_path / "seeds", seeds=2, **options)
    for result, expected in zip(merged, claims(names, seeds=2, **options), strict=True):
        assert result.verdict.word == expected.verdict.word
        for name, condition, statistic in expected.statistics:
            assert result.statistics[name, condition].values == pytest.approx(statistic.values, rel=1e-6)
