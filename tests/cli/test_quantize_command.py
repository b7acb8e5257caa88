"""headwise quantise, as a person types it."""

import json
from pathlib import Path

import pytest

import headwise as hw
from tests.distillation.tiny import make
from tests.runner import headwise

TEXT = "to be or not to be that is the question " * 40


@pytest.fixture
def files(tmp_path: Path) -> Path:
    make().save(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_bytes_and_loss_are_told(files: Path) -> None:
    how = ("--weights", "*=4,0.1:qk=3,mlp=8", "--out", files / "small", "--plot", files / "bits.csv")
    told = json.loads(headwise("quantise", files / "model", files / "text.txt", *how, "--json").told)
    small = hw.load(files / "small")
    assert told["after"][-1]["bytes"] == small.spec.weight_bytes() < told["before"][-1]["bytes"]
    assert told["loss_after"]["mean"] == pytest.approx(told["loss_before"]["mean"] + told["more"]["mean"], abs=1e-6)
    assert "bits of qk,0.1,3.0" in (files / "bits.csv").read_text()
    shown = headwise("quantise", files / "model", "--weights", 8, "--limit", 0).told
    assert "bits a number" in shown
    assert "loss" not in shown
    facts = json.loads(headwise("info", files / "small", "--json").told)
    assert facts["weight_bits"] == "heads 4 3, mlp 8"
    assert facts["stored_megabytes"] == pytest.approx(small.spec.weight_bytes() / 1e6)


def test_mistakes_are_told(files: Path) -> None:
    for weights, told in (("5", "8, 4, 3 or 2 bits"), ("much", "weights are bits"), ("9.1=4", "names no head here")):
        assert told in headwise("quantise", files / "model", "--weights", weights, "--limit", 0).refused
    headwise("quantise", files / "model", "--weights", 4, "--limit", 0, "--out", files / "small")
    assert "at few bits already" in headwise("quantise", files / "small", "--weights", 4, "--limit", 0).refused


def test_sensitivity_is_told_and_drawn(files: Path) -> None:
    how = ("--bits", "4,2", "--heads", "0.*", "--limit", 2, "--out", files / "bits.jsonl", "--plot", files / "grid.svg")
    told = json.loads(headwise("sensitivity", files / "model", files / "text.txt", *how, "--json").told)
    assert len(told["costs"]) == 4 * 2 * 2
    assert "qk at 4 bits" in (files / "grid.svg").read_text()
    shown = headwise("sensitivity", files / "model", files / "text.txt", *how).told  # gone on with: nothing left to do
    assert "What few bits cost, nats a token" in shown
    assert "8, 4, 3 or 2 bits" in headwise("sensitivity", files / "model", files / "text.txt", "--bits", "5").refused
    assert "numbers with commas" in headwise("sensitivity", files / "model", "--bits", "few").refused


def test_bits_are_shared_out_by_sensitivity(files: Path) -> None:
    headwise("sensitivity", files / "model", files / "text.txt", "--limit", 2, "--out", files / "bits.jsonl")
    how = ("--mean-bits", 3.5, "--by", files / "bits.jsonl", "--choices", "4,3", "--seeds", 2, "--out", files / "small")
    shown = headwise("quantise", files / "model", files / "text.txt", "--weights", "mlp=8", *how)
    assert "Bits shared out: 8 pairs at 4, 8 pairs at 3" in shown.told
    assert json.loads(headwise("info", files / "small", "--json").told)["weight_bits"] == "heads 4 3, mlp 8"
    told = json.loads(headwise("quantise", files / "model", files / "text.txt", *how[:-2], "--json").told)
    assert len(told["allocation"]["random"]) == 2
    assert "give both" in headwise("quantise", files / "model", "--mean-bits", 3.5).refused
    small = ("--megabytes", 0.0019, *how[2:6])
    shared = json.loads(headwise("quantise", files / "model", files / "text.txt", *small, "--limit", 0, "--json").told)
    heads = next(one for one in shared["after"] if one["part"] == "heads")
    assert heads["bytes"] <= 1900 < next(one for one in shared["before"] if one["part"] == "heads")["bytes"]
    assert "one of them" in headwise("quantise", files / "model", "--megabytes", 1, *how[:4]).refused
    assert "choices are bits" in headwise("quantise", files / "model", *how[:4], "--choices", "few").refused
    make(5).save(files / "other")
    assert "another model" in headwise("quantise", files / "other", *how[:4], "--limit", 0).refused
