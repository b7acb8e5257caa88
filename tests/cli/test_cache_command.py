"""headwise cache on the command line."""

import json
from pathlib import Path

import pytest

import headwise as hw
from headwise.compression.streaming_selection import STREAM_RANKERS
from tests.distillation.tiny import make_model
from tests.runner import run_command

TEXT = "to be or not to be that is the question, whether it is nobler in the mind " * 20
SMALL_CACHE = ("--sink-tokens", 2, "--window", 8, "--seeds", 1, "--max-texts", 6)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    make_model().save(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_cache_reports_bytes_and_saved_model_uses_policy(files: Path) -> None:
    out = ("--out", files / "small", "--save-plan", files / "plan.json", "--plot", files / "bytes.svg")
    command = ("cache", files / "model", files / "text.txt", *SMALL_CACHE)
    result = json.loads(run_command(*command, "--fraction", 0.5, *out, "--fractions", "0.5", "--json").output)
    assert (
        result["report"]["compression_ratio"] == result["report"]["bytes_before"] / result["report"]["bytes_after"] > 1
    )
    assert sum(len(rule["heads"]) for rule in result["plan"]["rules"]) == 4
    assert len(result["curve"]) == 1 + 1 + 3
    assert "cache size, MB" in (files / "bytes.svg").read_text()
    small = hw.load(files / "small")
    output = run_command("generate", files / "small", "to be or not to be", "--max-new-tokens", 6, "--json").output
    assert json.loads(output)["text"] == small.generate("to be or not to be", 6)
    table = run_command(*command, "--plan", files / "plan.json").output
    assert "4 of 8 KV heads have a limited cache, selected by output." in table
    assert "s  streaming 2 + 8: 4 KV heads" in table
    assert "tokens after position 10" in table
    assert "× smaller" in table
    assert "random plans, 1 seeds" in table
    assert "all at fewer bits" in run_command(*command, "--bits", 8, "--curve", "--fractions", "1").output
    help_text = " ".join(run_command("cache", "--help", columns=200).output.replace("│", " ").split())
    assert f"KV heads: {', '.join(STREAM_RANKERS)}." in help_text
    assert "streaming 2 + 8: 4 of 8 KV heads" in run_command("info", files / "small").output


def test_cache_invalid_options_raise(files: Path) -> None:
    command = ("cache", files / "model", files / "text.txt", *SMALL_CACHE)
    for options, message in (
        ((), "how to reduce the cache"),
        (("--fraction", 0.5, "--heads", "0.1"), "how to reduce the cache"),
        (("--bits", 5), "32, 16, 8, 4 bits"),
        (("--heads", "9.1"), "no such head"),
        (("--fraction", 0.5, "--ranking", "magic"), "attention, gates, loss, output, pattern, random"),
        (("--fraction", 0.5, "--fractions", "many", "--curve"), "comma-separated list of numbers"),
        (("--fraction", 0.5, "--plot", "curve.bmp"), "curve.bmp"),
    ):
        assert message in run_command(*command, *options).error_line
    make_model(kind="encoder").save(files / "encoder")
    assert "only a decoder" in run_command("cache", files / "encoder", "--bits", 8).error_line
    run_command(*command, "--heads", "0.1", "--save-plan", files / "plan.json")
    make_model(5).save(files / "other")
    error = run_command(
        "cache", files / "other", files / "text.txt", *SMALL_CACHE, "--plan", files / "plan.json"
    ).error_line
    assert "other weights" in error
