"""The command line as a person uses it."""

import json
from pathlib import Path

import headwise as hw
from tests.runner import alone, headwise


def test_the_second_half_of_the_demo_trains_looks_cuts_and_writes(tmp_path: Path) -> None:
    done = headwise("demo", "--train", "--quick", "--out", str(tmp_path / "demo"))
    assert done.code == 0, done.err
    told = " ".join(done.out.split())
    for said in (
        "Ctrl-C leaves it out, and nothing is lost",
        "Trained 24 steps",
        "8 heads on 40 texts",
        "heads are cut, chosen by ablation",
        "What it cost",
        "headwise view",
    ):
        assert said in told
    assert (tmp_path / "demo" / "trained" / "report.html").is_file()


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "mine.txt").write_text("mine")
    done = headwise("demo", "--train", "--quick", "--out", str(tmp_path))
    assert done.code == 2
    assert done.err.startswith(f"headwise: {tmp_path / 'trained'} is there already and holds something else")
    assert [path.name for path in (tmp_path / "trained").iterdir()] == ["mine.txt"]


def test_presets_lists_all() -> None:
    listed = json.loads(headwise("presets", "--json").out)
    assert [row["preset"] for row in listed] == list(hw.presets())
    assert {row["preset"]: row["parameters"] for row in listed}["gpt2"] == 124_439_808
    table = headwise("presets").out
    assert all(name in table for name in hw.presets())
    assert "124,439,808" in table


def test_an_unknown_verb_is_refused() -> None:
    done = alone("heds")
    assert done.code == 2
    assert "No such command" in done.err
