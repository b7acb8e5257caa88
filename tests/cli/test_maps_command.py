"""headwise attend, as a person uses it."""

import csv
import json
import re
from pathlib import Path

import pytest

import headwise as hw
from tests.runner import Done, headwise

TEXT = "The cat sat on the mat because it was warm."


def attend(*arguments: object) -> str:
    return asked(*arguments).told


def asked(*arguments: object) -> Done:
    return headwise("attend", "minilm", *arguments)


def test_a_heads_looks_with_bars() -> None:
    told = attend(TEXT, "--head", "5.11")
    assert "Head 5.11" in told
    assert "█" in told
    assert all(word in told for word in ("[CLS]", "because", "warm", "[SEP]"))


def test_one_word_as_json_sums_to_one() -> None:
    told = json.loads(attend(TEXT, "--head", "5.11,0.2", "--from", "it", "--json"))
    assert told["words"][1:4] == ["The", "cat", "sat"]
    assert list(told["rows"]) == ["0.2", "5.11"]
    assert sum(told["rows"]["5.11"].values()) == pytest.approx(1, abs=1e-4)
    assert max(told["rows"]["0.2"], key=told["rows"]["0.2"].get) == "because", "a previous-token head"


def test_heads_for_a_pair_and_the_hardest_looks() -> None:
    ranked = json.loads(attend(TEXT, "--from", "it", "--to", "cat", "--json"))["heads"]
    assert len(ranked) == 8
    assert [row["weight"] for row in ranked] == sorted((row["weight"] for row in ranked), reverse=True)
    assert ranked[0]["head"] in attend(TEXT, "--from", "it", "--to", "cat")
    looks = json.loads(attend(TEXT, "--most", "3", "--json"))["looks"]
    assert [sorted(look) for look in looks] == [["attended", "head", "weight", "word"]] * 3
    assert "The hardest looks" in attend(TEXT)


def test_whole_maps_as_json_by_tokens() -> None:
    told = json.loads(attend("A cataclysm.", "--head", "5.11", "--tokens", "--json"))
    assert told["words"] == ["[CLS]", "A", "cat", "ac", "ly", "sm", ".", "[SEP]"]
    assert [len(row) for row in told["maps"]["5.11"]] == [8] * 8


def test_words_that_look_like_markup_are_printed_as_they_are() -> None:
    assert "[" in attend("a [/b] cat", "--head", "5.11", "--tokens")


def test_pictures(tmp_path: Path) -> None:
    attend(TEXT, "--head", "5.11", "--heat", str(tmp_path / "a.svg"), "--arcs", str(tmp_path / "b.svg"))
    assert (tmp_path / "a.svg").stat().st_size > 1000
    assert (tmp_path / "b.svg").stat().st_size > 1000


def test_a_picture_of_where_a_word_looks_chooses_its_heads(tmp_path: Path) -> None:
    """One head for each of the words it looks at hardest, by the numbers of whole maps."""
    attend(TEXT, "--from", "it", "--arcs", str(tmp_path / "it.csv"))
    rows = list(csv.DictReader((tmp_path / "it.csv").read_text().splitlines()))
    heads = list(dict.fromkeys(row["head"] for row in rows))
    assert len(heads) == 3
    assert {row["word"] for row in rows} == {"it"}
    seen = hw.attend(hw.load("minilm"), TEXT)
    rest = {"it", "[CLS]", "[SEP]", "The"}  # where nothing is looked for: itself, the first word, special tokens
    looks = {(head, word): weight for head in seen.heads for word, weight in seen.row("it", head) if word not in rest}
    best, hardest = max(looks.items(), key=lambda pair: pair[1])
    assert heads[0] == best[0]
    shown = {head: max((looks[head, w], w) for h, w in looks if h == head)[1] for head in heads}
    assert len(set(shown.values())) == 3, "each head shows another word"
    assert hardest > 0.5


def test_what_is_missing_is_said() -> None:
    assert "--to needs --from" in asked(TEXT, "--to", "cat").refused
    said = asked(TEXT, "--head", "5.11", "--from", "dog").refused
    assert re.search(r"'dog' is not there; there are .*mat, because", said)
