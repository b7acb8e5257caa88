"""headwise find: wrong options are reported before the search."""

import json
from pathlib import Path

import pytest

from tests.runner import run_command

WORDS = ["cat", "dog", "pen", "sun", "hat", "box", "car", "cup", "bed", "key"]


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("find") / "examples.jsonl"
    rows = [{"text": f"a {word} is a {word}", "pairs": [[4, 1]]} for word in WORDS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--alignment-heads", "."], "--job alignment"),
        (["--job", "alignment", "--alignment-heads", "no-such-folder"], "not a folder"),
        (["--job", "alignment"], "job='pairs'"),
        (["--max-rows", "0"], "max-rows"),
        (["--save", "heads.txt"], "suffix"),
        (["--compare", "nothing.json"], "nothing.json"),
    ],
)
def test_find_wrong_options_are_reported_before_the_search(examples: Path, options: list[str], message: str) -> None:
    result = run_command("find", "minilm", examples, *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
