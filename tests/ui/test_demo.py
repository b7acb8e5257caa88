"""The demo with small sizes: written files, results, and stages that fit on one screen."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import headwise as hw
from headwise.analysis.roles.roles import RoleEvidence
from headwise.compression import PruneRequest
from headwise.ui.head_summary import summary_lines
from headwise.ui.pretrained_model_demo import PretrainedDemoRunner, search_atom_mapping_heads
from headwise.ui.print_demo import MAX_STAGE_LINES, StagePrinter, show_demo_head, show_demo_roles, show_demo_search
from headwise.ui.train_and_prune_demo import MAX_LOSS_INCREASE, DemoTrainResult, run_train_prune_demo
from tests.runner import run_command


def stage_lengths(output: str) -> dict[str, int]:
    """Return the number of printed lines of each stage, from its heading to the next one, at 80 columns."""
    lengths: dict[str, int] = {}
    heading = ""
    for line in output.splitlines():
        if re.match(r"\d+ of \d+: |What to try next", line):
            heading = line
        if heading:
            lengths[heading] = lengths.get(heading, 0) + max(1, -(-len(line) // 80))
    return lengths


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> DemoTrainResult:
    return run_train_prune_demo(tmp_path_factory.mktemp("show") / "demo", quick=True)


def test_demo_training_writes_all_listed_files(result: DemoTrainResult) -> None:
    written = {str(path.relative_to(result.folder)) for path in result.folder.rglob("*") if path.is_file()}
    assert written == set(result.files)
    figures = {"roles.png", "depth.png", "pruning.png", "sentence.png", "history.png"}
    assert written >= figures | {"report.html", "plan.json", "profile.npz", "model/spec.json", "small/spec.json"}
    assert all((result.folder / name).read_bytes().startswith(b"\x89PNG") for name in figures)
    assert b'id="report-data"' in (result.folder / "report.html").read_bytes()


def test_demo_training_saved_models_match_report(result: DemoTrainResult) -> None:
    model, small = (hw.load(result.folder / name) for name in ("model", "small"))
    pruned_heads = set(model.spec.head_addresses) - set(small.spec.head_addresses)
    assert {str(head) for head in pruned_heads} == set(result.plan.pruned_heads)
    assert 1 <= len(pruned_heads) < len(model.spec.head_addresses)
    assert (result.report.before.heads, result.report.after.heads) == (
        len(model.spec.head_addresses),
        len(small.spec.head_addresses),
    )
    assert hw.apply(hw.Plan.load(result.folder / "plan.json"), model).spec == small.spec
    assert hw.Profile.load(result.folder / "profile.npz").table() == result.profile.table()
    assert result.report.loss_increase.mean < 10 * MAX_LOSS_INCREASE * result.report.loss_before.mean, (
        "heads of an untrained model are unimportant"
    )


def test_demo_training_to_dict_is_json(result: DemoTrainResult) -> None:
    data = json.loads(json.dumps(result.to_dict()))
    assert data["pruned_heads"] == list(result.plan.pruned_heads)
    assert {score["probe"] for score in data["synthetic_eval"]} == {"bracket", "surname", "agreement", "referent"}


def test_demo_training_repeated_gives_same_result(result: DemoTrainResult) -> None:
    second = run_train_prune_demo(result.folder, quick=True)
    assert second.plan.pruned_heads == result.plan.pruned_heads
    assert second.report.loss_after == result.report.loss_after


def test_demo_training_interrupted_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.ui.train_and_prune_demo.train", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_train_prune_demo(tmp_path / "demo", quick=True)
    assert list(tmp_path.iterdir()) == []


def test_demo_training_emergence_starts_below_threshold(result: DemoTrainResult) -> None:
    for step, head, metric_name, final_value in result.emergence():
        values = result.history.curve(head, metric_name if metric_name == "induction" else f"{metric_name} hits")
        assert step > 0
        assert values[0] < 0.5 <= max(values)
        assert final_value == values[-1]


def test_demo_stages_run_on_real_models(tmp_path: Path) -> None:
    demo, pieces = PretrainedDemoRunner(tmp_path / "demo", quick=True), []
    text = demo.generate(pieces.append)
    assert "".join(pieces) == text
    assert len(text.split()) > 8
    assert demo.attention_view().top_edges(3, "their")[0].word == "their"
    head_profile, top_head = demo.profile_encoder()
    assert (tmp_path / "demo" / "minilm" / "report.html").is_file()
    assert str(top_head.address) in summary_lines(head_profile, top_head)[0].text
    names = [f"pronoun-antecedent {number}" for number in range(30)]
    evidence = [
        RoleEvidence(name, "<", "causal", 0.98765, 0.12345, (0.91, 1.0), 0.9, 0.00012, 2.0, "referent", 123_456)
        for name in names
    ]
    many_roles = replace(head_profile, evidence=[evidence, *head_profile.evidence[1:]])
    console = Console(file=StringIO(), width=80)
    stages = StagePrinter(console, 3)
    stages.print_stage("Roles of all heads", "A sentence. " * 13)
    show_demo_roles(many_roles, Path("headwise-demo/minilm/profile.npz"), console)
    stages.print_stage("One head in words", "A sentence. " * 13)
    show_demo_head(many_roles, many_roles["0.0"], Path("report.html"), console)
    stages.print_stage("Heads that do a job", "A sentence. " * 13)
    search = search_atom_mapping_heads()
    assert {head.split(".")[1] for head in search.supported_heads} == {"5"}
    show_demo_search(search, console)
    lengths = stage_lengths(console.file.getvalue())  # pyright: ignore[reportAttributeAccessIssue]
    assert len(lengths) == 3
    assert max(lengths.values()) <= MAX_STAGE_LINES, lengths


@pytest.mark.slow
def test_demo_stages_print_at_most_25_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_command("demo", "--quick", "--out", "demo", columns=80)
    assert done.code == 0, done.err
    lengths = stage_lengths(done.out)
    assert len(lengths) == 12, "eleven stages and the next steps"
    assert max(lengths.values()) <= MAX_STAGE_LINES, lengths


@pytest.mark.slow
def test_demo_prune_recovers_real_model(tmp_path: Path) -> None:
    pruned = PretrainedDemoRunner(tmp_path / "demo", quick=True).prune()
    assert len(pruned.plan.pruned_heads) == 27, "10% of 270"
    assert pruned.report.recovered is not None
    assert hw.Plan.load(pruned.plan_path).pruned_heads == pruned.plan.pruned_heads


@pytest.mark.slow
def test_demo_costs_and_pruned_model_runs_in_llama_cpp(tmp_path: Path) -> None:
    from headwise.ui.pretrained_model_demo import (
        DEMO_HEADS,
        compare_with_llama_cpp,
        demo_head_cache_rows,
        measure_demo_quantization_sensitivity,
    )

    model = hw.load("smollm2")
    costs = measure_demo_quantization_sensitivity(model, 4)
    assert {cost.part for cost in costs} == {"qk", "vo", "keys", "values"}
    assert all(any(head in cost.heads.split() for head in DEMO_HEADS) for cost in costs)
    assert [row[3] for row in demo_head_cache_rows(model)] == [
        4096 * 2 * 64 * 4 / 1e6
    ] * 2  # keys and values with 64 dimensions, 4 bytes each
    pytest.importorskip("xllamacpp")
    sample = compare_with_llama_cpp(
        model,
        hw.plan_pruning(model, PruneRequest(heads="3.0,5.1,20.4", fold_mean=False)),
        tmp_path / "elsewhere",
        "Once upon a time",
        6,
    )
    assert sample is not None
    assert sample.file.stat().st_size > 10**8
    assert sample.num_equal_tokens >= 1
    assert sample.engine_text.startswith("Once upon a time")
