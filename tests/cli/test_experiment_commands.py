"""headwise sweep and headwise claims, as tables and as JSON."""

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
    assert "…" not in out  # no number is truncated at 80 columns
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
            "width 16 is not divisible by 7. Use 4 or 8",
        ),
        (("sweep", "--num-heads", "1,two"), "Got '1,two'"),
        (("sweep", "--seeds", "0"), "at least one seed"),
        (("sweep", "--depth", "--layers", "1"), "layers and heads must both be at least 2"),
        (("sweep", "--plot", "sweep.doc"), "the suffix must be one of"),
        (("sweep", "--depth", "--num-heads", "1,2"), "--num-heads and --head-dim do not apply"),
        (("claims", "dept"), "did you mean depth"),
        (("claims", "--quick", "--full"), "Use one of them"),
        (("claims", "--full", "--seeds", "5"), "one of them"),
        (("claims", "--seeds", "0"), "at least one seed"),
        (("claims", "--seeds", "2", "--model", "little"), "apply only to models that are trained here"),
        (("claims", "--first-seed", "-1"), "first_seed must be at least 0"),
        (("claims", "--corpus", "a.txt"), "Add --model MODEL"),
        (
            ("claims", "loss-vs-head-count", "--model", "minilm"),
            "loss-vs-head-count: cannot be tested on a given model",
        ),
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
    assert "indicative claim verdict details" in " ".join(output.split())
    assert sorted(path.name for path in out.iterdir()) == [
        "01-same-numbers.svg", "03-parameters.svg", "claims.html", "claims.json", "claims.md",
    ]  # fmt: skip
    saved = json.loads((out / "claims.json").read_text())
    assert [claim["verdict"] for claim in saved] == ["holds", "true by construction"]
    assert "headwise claims parameters" in (out / "claims.md").read_text()
    code, output, _ = run_command(*command, "--json")
    assert json.loads(output) == saved
    assert [(claim["seeds"], claim["exploratory"]) for claim in saved] == [([0], True)] * 2
    assert saved[1]["identity"].startswith("a plain layer has four matrices")
    command = ("claims", "parameters", "--cache", str(tmp_path / "cache"), "--processes", "1")
    code, output, _ = run_command(*command, "--seeds", "2", "--first-seed", "40")
    assert "2 seeds (40 to 41)" in output
    assert "looked at" not in output
