"""headwise maps on the command line."""

import csv
import json
import re
from pathlib import Path

import pytest

import headwise as hw
from tests.runner import CommandResult, run_command

TEXT = "The cat sat on the mat because it was warm."


def run_maps(*arguments: object) -> str:
    return invoke_maps(*arguments).output


def invoke_maps(*arguments: object) -> CommandResult:
    return run_command("maps", "minilm", *arguments)


def test_maps_one_head_prints_bars() -> None:
    output = run_maps(TEXT, "--heads", "5.11")
    assert "Head 5.11" in output
    assert "█" in output
    assert all(word in output for word in ("[CLS]", "because", "warm", "[SEP]"))


def test_maps_json_row_sums_to_one() -> None:
    result = json.loads(run_maps(TEXT, "--heads", "5.11,0.2", "--query", "it", "--json"))
    assert result["words"][1:4] == ["The", "cat", "sat"]
    assert list(result["rows"]) == ["0.2", "5.11"]
    assert sum(result["rows"]["5.11"].values()) == pytest.approx(1, abs=1e-4)
    assert max(result["rows"]["0.2"], key=result["rows"]["0.2"].get) == "because", "a previous-token head"


def test_maps_word_pair_ranks_heads() -> None:
    ranked = json.loads(run_maps(TEXT, "--query", "it", "--key", "cat", "--json"))["heads"]
    assert len(ranked) == 8
    assert [row["weight"] for row in ranked] == sorted((row["weight"] for row in ranked), reverse=True)
    assert ranked[0]["head"] in run_maps(TEXT, "--query", "it", "--key", "cat")
    edges = json.loads(run_maps(TEXT, "--max-rows", "3", "--json"))["edges"]
    assert [sorted(edge) for edge in edges] == [["attended", "head", "weight", "word"]] * 3
    assert "Largest attention weights" in run_maps(TEXT)


def test_maps_json_tokens_gives_full_maps() -> None:
    result = json.loads(run_maps("A cataclysm.", "--heads", "5.11", "--no-words", "--json"))
    assert result["words"] == ["[CLS]", "A", "cat", "ac", "ly", "sm", ".", "[SEP]"]
    assert [len(row) for row in result["maps"]["5.11"]] == [8] * 8


def test_maps_markup_in_text_is_printed_literally() -> None:
    assert "[" in run_maps("a [/b] cat", "--heads", "5.11", "--no-words")


def test_maps_heat_and_arcs_write_figures(tmp_path: Path) -> None:
    run_maps(TEXT, "--heads", "5.11", "--heatmap", str(tmp_path / "a.svg"), "--arcs", str(tmp_path / "b.svg"))
    assert (tmp_path / "a.svg").stat().st_size > 1000
    assert (tmp_path / "b.svg").stat().st_size > 1000


def test_maps_arcs_of_word_selects_top_heads(tmp_path: Path) -> None:
    """The listed weights are the largest of the full maps."""
    run_maps(TEXT, "--query", "it", "--arcs", str(tmp_path / "it.csv"))
    rows = list(csv.DictReader((tmp_path / "it.csv").read_text().splitlines()))
    heads = list(dict.fromkeys(row["head"] for row in rows))
    assert len(heads) == 3
    assert {row["word"] for row in rows} == {"it"}
    view = hw.attention_maps(hw.load("minilm"), TEXT)
    idle_targets = {
        "it",
        "[CLS]",
        "[SEP]",
        "The",
    }  # excluded keys: the word itself, the first word, special tokens
    weights = {
        (head, word): weight
        for head in view.heads
        for word, weight in view.attention_from_word("it", head)
        if word not in idle_targets
    }
    best, max_weight = max(weights.items(), key=lambda pair: pair[1])
    assert heads[0] == best[0]
    top_words = {head: max((weights[head, w], w) for h, w in weights if h == head)[1] for head in heads}
    assert len(set(top_words.values())) == 3, "each head shows another word"
    assert max_weight > 0.5


def test_maps_missing_word_or_option_raises() -> None:
    assert "Add --query WORD" in invoke_maps(TEXT, "--key", "cat").error_line
    error = invoke_maps(TEXT, "--heads", "5.11", "--query", "dog").error_line
    assert re.search(r"'dog': not in the text.*mat, because", error)
