"""The command line as a person uses it."""

import json
import subprocess
import sys

import pytest

import headwise as hw


def headwise(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headwise", *arguments], capture_output=True, text=True)


def test_demo_shows_every_head_and_the_kernel() -> None:
    done = headwise("demo")
    assert done.returncode == 0, done.stderr
    assert "Kernel: fused" in done.stdout
    assert "bitwise the same" in done.stdout
    assert all(f"{layer}.{head}" in done.stdout for layer in range(4) for head in range(4))


def test_demo_as_json() -> None:
    result = json.loads(headwise("demo", "The cat sat on the mat.", "--json").stdout)
    assert result["sentence"] == "The cat sat on the mat."
    assert result["kernel"] == "fused"
    assert result["looking_changed_nothing"] is True
    assert len(result["heads"]) == 16


@pytest.mark.parametrize("sentence", ["", "x" * 257])
def test_a_sentence_the_demo_cannot_read_is_one_line_of_advice(sentence: str) -> None:
    done = headwise("demo", sentence)
    assert done.returncode == 2
    assert done.stderr == f"headwise: the sentence has {len(sentence)} bytes; the demo's model reads 1 to 256.\n"


def test_presets_lists_all() -> None:
    listed = json.loads(headwise("presets", "--json").stdout)
    assert [row["preset"] for row in listed] == list(hw.presets())
    assert {row["preset"]: row["parameters"] for row in listed}["gpt2"] == 124_439_808
    table = headwise("presets").stdout
    assert all(name in table for name in hw.presets())
    assert "124,439,808" in table


def test_an_unknown_verb_is_refused() -> None:
    done = headwise("heds")
    assert done.returncode == 2
    assert "No such command" in done.stderr
