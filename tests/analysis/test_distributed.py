"""Two processes that share the texts produce the result of one process, and both produce the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.analysis.roles.profile import profile
from headwise.analysis.roles.profile_result import Profile
from headwise.text.annotated_document import Document
from headwise.text.corpus import Corpus
from tests.analysis.team_script import make_profile
from tests.analysis.test_merge import assert_same, untrained_model
from tests.distributed.process_fixtures import WorkerGroup

ROOT = Path(__file__).parents[2]


def run_two_processes(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "140"}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600
    )


@pytest.mark.parametrize("kind", ["documents", pytest.param("texts", marks=pytest.mark.slow)])
def test_profile_two_processes_equal_one(two: WorkerGroup, kind: str, tmp_path: Path) -> None:
    two.run("tests.analysis.team_script:save_profile", str(tmp_path), kind)
    results = [json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in "01"]
    assert results[0] == results[1], "ablations and all"
    expected = make_profile(kind)
    for rank in "01":
        loaded = Profile.load(tmp_path / f"{rank}.npz")
        assert_same(loaded, expected)
        for head, alone in zip(loaded, expected, strict=True):
            assert head.effect == pytest.approx(alone.effect, abs=1e-5)
    if kind == "documents":
        assert expected["1.0"].evidence_level == "causal"


@pytest.mark.slow
def test_profile_fewer_texts_than_processes_raises(tmp_path: Path) -> None:
    done = run_two_processes("tests.analysis.team_script", str(tmp_path), "few")
    assert done.returncode != 0
    assert "1 texts cannot be split over 2 processes" in done.stderr


@pytest.mark.slow
def test_profile_command_only_rank_zero_prints(tmp_path: Path) -> None:
    model = untrained_model()
    folder, saved, gold = str(model.save(tmp_path / "model")), tmp_path / "profile.npz", tmp_path / "gold.jsonl"
    docs = [d for d in Corpus.synthetic("held-out", documents=9, seed=5).items() if isinstance(d, Document)]
    rows = ({"words": d.words, "relations": d.relations} for d in docs)
    gold.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    done = run_two_processes("headwise", "profile", folder, "--treebank", str(gold), "--json", "--save", str(saved))
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # one record: only one process printed
    assert [head["address"] for head in data["heads"]] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    assert_same(Profile.load(saved), profile(model, gold))
