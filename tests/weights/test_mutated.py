"""Files damaged byte by byte: an error or a successful load, never a crash, a hang, another error, or executed code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load_damaged_files(folder: Path, count: int, seed: int) -> dict[str, int]:
    """Load `count` damaged files in a separate process."""
    command = [sys.executable, "-m", "tests.weights.mutate_script", str(folder), str(count), str(seed)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=3000
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["wrong"] == []
    assert counts["loaded"] + counts["refused"] == count
    assert counts["refused"] > count / 4, "most damage shows"
    return counts


def test_load_few_damaged_files_raise_or_load(tmp_path: Path) -> None:
    load_damaged_files(tmp_path / "few", 120, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12])
def test_load_thousands_of_damaged_files_raise_or_load(seed: int, tmp_path: Path) -> None:
    load_damaged_files(tmp_path / "many", 3000, seed)
