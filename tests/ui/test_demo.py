"""The demo's two halves, in small: what they say they wrote is there, and is what was measured."""

import json
from pathlib import Path

import pytest

import headwise as hw
from headwise.ui.demo import Demo
from headwise.ui.demo_training import ALLOWED, Training, training
from headwise.ui.head_summary import story


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return training(tmp_path_factory.mktemp("show") / "demo", quick=True)


def test_everything_is_written(made: Training) -> None:
    there = {str(path.relative_to(made.folder)) for path in made.folder.rglob("*") if path.is_file()}
    assert there == set(made.files)
    pictures = {"roles.png", "depth.png", "pruning.png", "sentence.png", "lives.png"}
    assert there >= pictures | {"report.html", "plan.json", "profile.npz", "model/spec.json", "small/spec.json"}
    assert all((made.folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert b'id="book"' in (made.folder / "report.html").read_bytes()


def test_the_models_are_the_ones_that_were_measured(made: Training) -> None:
    model, small = (hw.load(made.folder / name) for name in ("model", "small"))
    gone = set(model.spec.addresses) - set(small.spec.addresses)
    assert {str(head) for head in gone} == set(made.plan.cut)
    assert 1 <= len(gone) < len(model.spec.addresses)
    assert (made.report.before.heads, made.report.after.heads) == (len(model.spec.addresses), len(small.spec.addresses))
    assert hw.Plan.load(made.folder / "plan.json").apply(model).spec == small.spec
    assert hw.Profile.load(made.folder / "profile.npz").table() == made.profile.table()
    assert made.report.more.mean < 10 * ALLOWED * made.report.loss_before.mean, "heads of a model that knows nothing"


def test_the_result_is_plain_data(made: Training) -> None:
    told = json.loads(json.dumps(made.to_dict()))
    assert told["cut"] == list(made.plan.cut)
    assert {mark["quiz"] for mark in told["exam"]} == {"bracket", "surname", "agreement", "referent"}


def test_it_can_be_run_again_into_the_same_folder(made: Training) -> None:
    again = training(made.folder, quick=True)
    assert again.plan.cut == made.plan.cut
    assert again.report.loss_after == made.report.loss_after


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.ui.demo_training.train", stop)
    with pytest.raises(KeyboardInterrupt):
        training(tmp_path / "demo", quick=True)
    assert list(tmp_path.iterdir()) == []


def test_births_are_of_what_random_heads_do_not_do(made: Training) -> None:
    for step, head, what, share in made.births():
        first = made.history.of(head, what if what == "induction" else f"{what} hits")
        assert step > 0
        assert first[0] < 0.5 <= max(first)
        assert share == first[-1]


def test_real_models_stage_by_stage(tmp_path: Path) -> None:
    demo, pieces = Demo(tmp_path / "demo", quick=True), []
    text = demo.write_on(pieces.append)
    assert "".join(pieces) == text
    assert len(text.split()) > 8
    assert demo.look().strongest(3, "their")[0].word == "their"
    seen, most = demo.heads()
    assert (tmp_path / "demo" / "minilm" / "report.html").is_file()
    assert str(most.address) in story(seen, most)[0].text


@pytest.mark.slow
def test_heads_of_a_real_model_are_cut_and_healed(tmp_path: Path) -> None:
    cut = Demo(tmp_path / "demo", quick=True).cut()
    assert len(cut.plan.cut) == 27, "a tenth of 270"
    assert cut.report.healed is not None
    assert hw.Plan.load(cut.saved).cut == cut.plan.cut


@pytest.mark.slow
def test_two_heads_are_priced_and_the_cut_model_runs_in_llama_cpp(tmp_path: Path) -> None:
    from headwise.ui.demo_costs import HEADS, ask_prices, cache_rows, run_elsewhere

    model = hw.load("smollm2")
    found = ask_prices(model, 4)
    assert {cost.part for cost in found} == {"qk", "vo", "keys", "values"}
    assert all(any(head in cost.heads.split() for head in HEADS) for cost in found)
    assert [row[3] for row in cache_rows(model)] == [
        4096 * 2 * 64 * 4 / 1e6
    ] * 2  # keys and values of 64 numbers, 4 bytes
    pytest.importorskip("xllamacpp")
    made = run_elsewhere(
        model, hw.Plan.make(model, cut="3.0,5.1,20.4", fold=False), tmp_path / "elsewhere", "Once upon a time", 6
    )
    assert made is not None
    assert made.file.stat().st_size > 10**8
    assert made.same >= 1
    assert made.theirs.startswith("Once upon a time")
