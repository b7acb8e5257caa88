"""headwise sweep and headwise claims, as a person and a program use them."""

import json
from pathlib import Path

import pytest
from filelock import FileLock

from tests.runner import run_command

SWEEP = (
    "--num-heads",
    "1,width",
    "--width",
    "16",
    "--steps",
    "8",
    "--batch-size",
    "4",
    "--seeds",
    "1",
    "--processes",
    "1",
)


def test_sweep_prints_table_figure_and_json(tmp_path, lab_cache):
    command = ("sweep", *SWEEP, "--cache", str(lab_cache))
    with FileLock(lab_cache / "lock"):
        code, out, _ = run_command(*command, "--plot", tmp_path / "sweep.svg", columns=80)
    assert code == 0
    assert "constant heads × head_dim" in " ".join(out.split())
    assert "…" not in out  # every figure can be read in 80 columns
    assert (tmp_path / "sweep.svg").read_text().startswith("<?xml")
    code, out, _ = run_command(*command, "--json")
    rows = json.loads(out)["rows"]
    assert [(row["heads"], row["head_dim"]) for row in rows] == [(1, 16), (16, 1)]
    assert {"loss", "probe_accuracy", "diversity", "speed", "memory", "parameters"} <= set(rows[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("sweep", "--num-heads", "1,7", "--width", "16"),
            "7 heads do not divide a width of 16; nearest to it 4 and 8 would",
        ),
        (("sweep", "--num-heads", "1,two"), "got '1,two'"),
        (("sweep", "--seeds", "0"), "at least one seed"),
        (("sweep", "--depth", "--layers", "1"), "none to spare"),
        (("sweep", "--plot", "sweep.doc"), "a picture is written as"),
        (("sweep", "--depth", "--num-heads", "1,2"), "leave out --num-heads"),
        (("claims", "dept"), "did you mean depth"),
        (("claims", "--quick", "--full"), "give one of them"),
        (("claims", "--full", "--seeds", "5"), "give one of them"),
        (("claims", "--seeds", "0"), "at least one seed"),
        (("claims", "--seeds", "2", "--model", "little"), "there already"),
        (("claims", "--first-seed", "-1"), "the first one cannot be -1"),
        (("claims", "--corpus", "a.txt"), "give --model MODEL too"),
        (("claims", "loss-vs-head-count", "--model", "minilm"), "loss-vs-head-count cannot be tried on a given model"),
    ],
)
def test_sweep_and_claims_invalid_options_raise(monkeypatch, tmp_path, words, message):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, out, err = run_command(*words)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_claims_list_gives_all_claims():
    code, out, _ = run_command("claims", "--list", "--json")
    listed = json.loads(out)
    assert code == 0
    assert [claim["number"] for claim in listed] == [*range(1, 28)]
    code, out, _ = run_command("claims", "--list")
    assert all(claim["name"] in out for claim in listed)


def test_claims_out_writes_page_and_figures(tmp_path: Path):
    out = tmp_path / "claims"
    command = ("claims", "same-numbers", "parameters", "--cache", str(tmp_path / "cache"), "--processes", "1")
    code, output, _ = run_command(*command, "--out", out, columns=300)
    assert code == 0
    assert "one seed (0): indicative" in output
    assert "true by construction: a plain layer has four matrices" in " ".join(output.split())
    assert "were looked at while rules were made" in " ".join(output.split())
    assert sorted(path.name for path in out.iterdir()) == [
        "01-same-numbers.svg", "03-parameters.svg", "claims.html", "claims.json", "claims.md",
    ]  # fmt: skip
    saved = json.loads((out / "claims.json").read_text())
    assert [claim["verdict"] for claim in saved] == ["holds", "depends"]
    assert "headwise claims parameters" in (out / "claims.md").read_text()
    code, output, _ = run_command(*command, "--json")
    assert json.loads(output) == saved
    assert [(claim["seeds"], claim["exploratory"]) for claim in saved] == [([0], True)] * 2
    assert saved[1]["identity"].startswith("a plain layer has four matrices")
    command = ("claims", "parameters", "--cache", str(tmp_path / "cache"), "--processes", "1")
    code, output, _ = run_command(*command, "--seeds", "2", "--first-seed", "40")
    assert "2 seeds (40 to 41)" in output
    assert "looked at" not in output
