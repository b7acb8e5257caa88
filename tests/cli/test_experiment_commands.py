"""headwise sweep and headwise claims, as a person and a program use them."""

import json
from pathlib import Path

import pytest
from filelock import FileLock

from tests.runner import headwise

SWEEP = ("--heads", "1,width", "--width", "16", "--steps", "8", "--batch", "4", "--seeds", "1", "--processes", "1")


def test_a_sweep_as_table_picture_and_json(tmp_path, lab_cache):
    asked = ("sweep", *SWEEP, "--cache", str(lab_cache))
    with FileLock(lab_cache / "lock"):
        code, out, _ = headwise(*asked, "--plot", tmp_path / "sweep.svg", columns=80)
    assert code == 0
    assert "constant heads × head_dim" in " ".join(out.split())
    assert "…" not in out  # every figure can be read in 80 columns
    assert (tmp_path / "sweep.svg").read_text().startswith("<?xml")
    code, out, _ = headwise(*asked, "--json")
    rows = json.loads(out)["rows"]
    assert [(row["heads"], row["head_dim"]) for row in rows] == [(1, 16), (16, 1)]
    assert {"loss", "marks", "diversity", "speed", "memory", "parameters"} <= set(rows[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("sweep", "--heads", "1,7", "--width", "16"),
            "7 heads do not divide a width of 16; nearest to it 4 and 8 would",
        ),
        (("sweep", "--heads", "1,two"), "got '1,two'"),
        (("sweep", "--seeds", "0"), "at least one seed"),
        (("sweep", "--depth", "--layers", "1"), "none to spare"),
        (("sweep", "--plot", "sweep.doc"), "a picture is written as"),
        (("sweep", "--depth", "--heads", "1,2"), "leave out --heads"),
        (("claims", "dept"), "did you mean depth"),
        (("claims", "--quick", "--full"), "give one of them"),
        (("claims", "--full", "--seeds", "5"), "give one of them"),
        (("claims", "--seeds", "0"), "at least one seed"),
        (("claims", "--seeds", "2", "--on", "little"), "there already"),
        (("claims", "--first-seed", "-1"), "the first one cannot be -1"),
        (("claims", "--text", "a.txt"), "give --on MODEL too"),
        (("claims", "hill", "--on", "minilm"), "hill cannot be tried on a given model"),
    ],
)
def test_what_cannot_be_done_is_said(monkeypatch, tmp_path, words, said):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, out, err = headwise(*words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())


def test_the_list():
    code, out, _ = headwise("claims", "--list", "--json")
    told = json.loads(out)
    assert code == 0
    assert [claim["number"] for claim in told] == [*range(1, 28)]
    code, out, _ = headwise("claims", "--list")
    assert all(claim["name"] in out for claim in told)


def test_claims_with_their_page(tmp_path: Path):
    out = tmp_path / "claims"
    asked = ("claims", "same-numbers", "parameters", "--cache", str(tmp_path / "cache"), "--processes", "1")
    code, said, _ = headwise(*asked, "--out", out, columns=300)
    assert code == 0
    assert "one seed (0): indicative" in said
    assert "true by construction: a plain layer has four matrices" in " ".join(said.split())
    assert "were looked at while rules were made" in " ".join(said.split())
    assert sorted(path.name for path in out.iterdir()) == [
        "01-same-numbers.svg", "03-parameters.svg", "claims.html", "claims.json", "claims.md",
    ]  # fmt: skip
    told = json.loads((out / "claims.json").read_text())
    assert [claim["verdict"] for claim in told] == ["holds", "depends"]
    assert "headwise claims parameters" in (out / "claims.md").read_text()
    code, said, _ = headwise(*asked, "--json")
    assert json.loads(said) == told
    assert [(claim["seeds"], claim["seen"]) for claim in told] == [([0], True)] * 2
    assert told[1]["identity"].startswith("a plain layer has four matrices")
    asked = ("claims", "parameters", "--cache", str(tmp_path / "cache"), "--processes", "1")
    code, said, _ = headwise(*asked, "--seeds", "2", "--first-seed", "40")
    assert "2 seeds (40 to 41)" in said
    assert "looked at" not in said
