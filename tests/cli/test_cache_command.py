"""headwise cache, as a person types it."""

import json
from pathlib import Path

import pytest

import headwise as hw
from headwise.compression.streaming_selection import STREAM_WAYS
from tests.distillation.tiny import make
from tests.runner import headwise

TEXT = "to be or not to be that is the question, whether it is nobler in the mind " * 20
FEW = ("--first", 2, "--last", 8, "--seeds", 1, "--limit", 6)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    make().save(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_bytes_and_loss_are_told_and_the_saved_model_obeys(files: Path) -> None:
    out = ("--out", files / "small", "--plan", files / "plan.json", "--plot", files / "bytes.svg")
    how = ("cache", files / "model", files / "text.txt", *FEW)
    told = json.loads(headwise(*how, "--stream", 0.5, *out, "--shares", "0.5", "--json").told)
    assert told["report"]["times"] == told["report"]["bytes_before"] / told["report"]["bytes_after"] > 1
    assert sum(len(rule["heads"]) for rule in told["plan"]["rules"]) == 4
    assert len(told["curve"]) == 1 + 1 + 3
    assert "megabytes of the cache" in (files / "bytes.svg").read_text()
    small = hw.load(files / "small")
    said = headwise("generate", files / "small", "to be or not to be", "--tokens", 6, "--json").told
    assert json.loads(said)["text"] == small.generate("to be or not to be", 6)
    shown = headwise(*how, "--apply", files / "plan.json").told
    assert "4 of 8 key heads keep less, chosen by writes." in shown
    assert "s  streaming 2 + 8: 4 key heads" in shown
    assert "tokens behind the first 10" in shown
    assert "× fewer bytes" in shown
    assert "random plans, 1 seeds" in shown
    assert "all at fewer bits" in headwise(*how, "--bits", 8, "--curve", "--shares", "1").told
    about = " ".join(headwise("cache", "--help", columns=200).told.replace("│", " ").split())
    assert f"ranked by {', '.join(STREAM_WAYS)}." in about
    assert "streaming 2 + 8: 4 of 8 key heads" in headwise("info", files / "small").told


def test_mistakes_are_told(files: Path) -> None:
    how = ("cache", files / "model", files / "text.txt", *FEW)
    for options, told in (
        ((), "say what key heads keep"),
        (("--stream", 0.5, "--heads", "0.1"), "say what key heads keep"),
        (("--bits", 5), "32, 16, 8, 4 bits"),
        (("--heads", "9.1"), "names no head here"),
        (("--stream", 0.5, "--by", "magic"), "cannot be ranked by"),
        (("--stream", 0.5, "--shares", "many", "--curve"), "shares are numbers"),
        (("--stream", 0.5, "--plot", "curve.bmp"), "curve.bmp"),
    ):
        assert told in headwise(*how, *options).refused
    make(kind="encoder").save(files / "encoder")
    assert "which has none" in headwise("cache", files / "encoder", "--bits", 8).refused
    headwise(*how, "--heads", "0.1", "--plan", files / "plan.json")
    make(5).save(files / "other")
    refused = headwise("cache", files / "other", files / "text.txt", *FEW, "--apply", files / "plan.json").refused
    assert "other weights" in refused
