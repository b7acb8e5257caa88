"""The demo, in small: what it says it wrote is there, and is what it measured."""

import json

import pytest

import headwise as hw
from headwise.show.demo import ALLOWED, Demo, demo


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return demo(tmp_path_factory.mktemp("show") / "demo", quick=True, progress=False)


def test_everything_is_written(made: Demo) -> None:
    there = {str(path.relative_to(made.folder)) for path in made.folder.rglob("*") if path.is_file()}
    assert there == set(made.files)
    pictures = {"roles.png", "depth.png", "pruning.png", "sentence.png", "lives.png"}
    assert there >= pictures | {"report.html", "plan.json", "profile.npz", "model/spec.json", "small/spec.json"}
    assert all((made.folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert b'id="book"' in (made.folder / "report.html").read_bytes()


def test_the_models_are_the_ones_that_were_measured(made: Demo) -> None:
    model, small = (hw.load(made.folder / name) for name in ("model", "small"))
    gone = set(model.spec.addresses) - set(small.spec.addresses)
    assert {str(head) for head in gone} == set(made.plan.heads)
    assert 1 <= len(gone) < len(model.spec.addresses)
    assert (made.report.before.heads, made.report.after.heads) == (len(model.spec.addresses), len(small.spec.addresses))
    assert hw.Plan.load(made.folder / "plan.json").apply(model).spec == small.spec
    assert hw.Profile.load(made.folder / "profile.npz").table() == made.profile.table()
    assert made.report.more.mean < 10 * ALLOWED * made.report.loss_before.mean, "heads of a model that knows nothing"


def test_the_result_is_plain_data(made: Demo) -> None:
    told = json.loads(json.dumps(made.to_dict()))
    assert told["cut"] == list(made.plan.heads)
    assert {mark["quiz"] for mark in told["exam"]} == {"bracket", "surname", "agreement", "referent"}


def test_it_can_be_run_again_into_the_same_folder(made: Demo) -> None:
    again = demo(made.folder, quick=True, progress=False)
    assert again.plan.heads == made.plan.heads
    assert again.report.loss_after == made.report.loss_after
