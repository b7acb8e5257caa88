"""The demo's two halves, in small: what they say they wrote is there, and is what was measured."""

import json
from pathlib import Path

import pytest

import headwise as hw
from headwise.compression import PruneRequest
from headwise.ui.demo_pretrained import Demo
from headwise.ui.demo_training import MAX_LOSS_INCREASE, DemoTrainResult, run_train_prune_demo
from headwise.ui.head_summary import summary_lines


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
        "heads of a model that knows nothing"
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

    monkeypatch.setattr("headwise.ui.demo_training.train", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_train_prune_demo(tmp_path / "demo", quick=True)
    assert list(tmp_path.iterdir()) == []


def test_demo_training_births_start_below_threshold(result: DemoTrainResult) -> None:
    for step, head, metric_name, final_value in result.emergence():
        values = result.history.curve(head, metric_name if metric_name == "induction" else f"{metric_name} hits")
        assert step > 0
        assert values[0] < 0.5 <= max(values)
        assert final_value == values[-1]


def test_demo_stages_run_on_real_models(tmp_path: Path) -> None:
    demo, pieces = Demo(tmp_path / "demo", quick=True), []
    text = demo.generate(pieces.append)
    assert "".join(pieces) == text
    assert len(text.split()) > 8
    assert demo.attention_view().top_edges(3, "their")[0].word == "their"
    head_profile, top_head = demo.profile_encoder()
    assert (tmp_path / "demo" / "minilm" / "report.html").is_file()
    assert str(top_head.address) in summary_lines(head_profile, top_head)[0].text


@pytest.mark.slow
def test_demo_prune_recovers_real_model(tmp_path: Path) -> None:
    pruned = Demo(tmp_path / "demo", quick=True).prune()
    assert len(pruned.plan.pruned_heads) == 27, "a tenth of 270"
    assert pruned.report.recovered is not None
    assert hw.Plan.load(pruned.plan_path).pruned_heads == pruned.plan.pruned_heads


@pytest.mark.slow
def test_demo_costs_and_pruned_model_runs_in_llama_cpp(tmp_path: Path) -> None:
    from headwise.ui.demo_pretrained import (
        DEMO_HEADS,
        compare_with_llama_cpp,
        demo_head_cache_rows,
        measure_demo_head_sensitivity,
    )

    model = hw.load("smollm2")
    costs = measure_demo_head_sensitivity(model, 4)
    assert {cost.part for cost in costs} == {"qk", "vo", "keys", "values"}
    assert all(any(head in cost.heads.split() for head in DEMO_HEADS) for cost in costs)
    assert [row[3] for row in demo_head_cache_rows(model)] == [
        4096 * 2 * 64 * 4 / 1e6
    ] * 2  # keys and values of 64 numbers, 4 bytes
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
