"""Two processes that share the texts tell what one would, and both tell the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.text.corpus import Corpus
from headwise.text.documents import Document
from tests.analysis.team_script import make
from tests.analysis.test_merge import assert_same, untrained
from tests.distributed.process_fixtures import Crew

ROOT = Path(__file__).parents[2]


def team(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120
    )


@pytest.mark.parametrize("which", ["documents", pytest.param("texts", marks=pytest.mark.slow)])
def test_two_share_the_texts_and_tell_what_one_does(two: Crew, which: str, tmp_path: Path) -> None:
    two.run("tests.analysis.team_script:keep", str(tmp_path), which)
    both = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in "01"]
    assert both[0] == both[1], "ablations and all"
    one = make(which)
    for rank in "01":
        made = Profile.load(tmp_path / f"{rank}.npz")
        assert_same(made, one)
        for mine, alone in zip(made, one, strict=True):
            assert mine.effect == pytest.approx(alone.effect, abs=1e-5)
    if which == "documents":
        assert one["1.0"].rung == "causal"


@pytest.mark.slow
def test_fewer_texts_than_processes_are_refused(tmp_path: Path) -> None:
    done = team("tests.analysis.team_script", str(tmp_path), "few")
    assert done.returncode != 0
    assert "1 texts cannot be shared out over 2 processes; start fewer" in done.stderr


@pytest.mark.slow
def test_one_of_them_speaks(tmp_path: Path) -> None:
    model = untrained()
    folder, saved, gold = str(model.save(tmp_path / "model")), tmp_path / "made.npz", tmp_path / "gold.jsonl"
    found = [d for d in Corpus.little("held-out", documents=9, seed=5).items() if isinstance(d, Document)]
    rows = ({"words": d.words, "relations": d.relations} for d in found)
    gold.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    done = team("headwise", "heads", folder, "--treebank", str(gold), "--json", "--save", str(saved))
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)  # one record, so one process printed it
    assert [head["address"] for head in shown["heads"]] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    assert_same(Profile.load(saved), profile(model, gold))
